"""Formats generated Python with `ruff format`, whatever settings the user's project has."""

from __future__ import annotations

import subprocess

from ruff import find_ruff_bin

LINE_LENGTH = 100


def format_source(text: str) -> str:
    """`text` as the formatter writes it; the same text always gives the same bytes."""
    done = subprocess.run(
        [
            find_ruff_bin(),
            "format",
            "--isolated",
            f"--line-length={LINE_LENGTH}",
            "--target-version=py312",
            "-",
        ],
        input=text,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, f"the generated source does not parse: {done.stderr}"
    return done.stdout
