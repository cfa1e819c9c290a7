"""The same plan gives the same bytes, also in a process that hashes strings in another order."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from mkc.viz.names import FILES
from mkc.viz.names import Format
from mkc.viz.write import pictures
from tests.viz.subjects import subject

ROOT = Path(__file__).parents[2]


def digests() -> list[str]:
    """Name and SHA-256 of every picture, both formats."""
    return [
        f"{name} {sha256(content).hexdigest()}"
        for format in Format
        for name, content in pictures(subject("dense", ranks=1), format)
    ]


def test_another_process_draws_the_same_bytes() -> None:
    here = digests()
    assert {one.split()[0] for one in here} == FILES
    program = "from tests.viz.test_deterministic import digests\nprint('\\n'.join(digests()))"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    assert printed.split("\n")[:-1] == here
