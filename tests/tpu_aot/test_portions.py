"""Weights are filled in place on TPUs: no second tape, not even for a moment."""

from __future__ import annotations

import subprocess
import sys
from json import loads
from pathlib import Path

from mkc.codegen_pallas.aot import child_environment


def test_portions_are_written_in_place(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.tpu_aot.portions_aot", "tpu7x:2x2x1"],
        env=child_environment(str(tmp_path)),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = loads(child.stdout.splitlines()[-1])
    assert set(found) == {"tape", "table", "page", "narrow"}
    for role, one in found.items():
        assert one["aliased_bytes"] == one["bytes"], role
        assert one["temporary_bytes"] < one["bytes"] / 16, role
        assert one["in_order"], role
