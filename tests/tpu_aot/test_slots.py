"""Saving, restoring and clearing slots at full size, compiled by the real TPU compiler."""

from __future__ import annotations

import subprocess
import sys
from json import loads
from pathlib import Path

import pytest

from mkc.codegen_pallas.aot import child_environment

MIB = 1 << 20
BATCH = 4


@pytest.mark.long
def test_slots_are_changed_in_place(tmp_path: Path) -> None:
    """No rank copies a whole state, needs memory for one, or asks another rank."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.tpu_aot.slots_aot", "tpu7x:2x2x1", str(BATCH), "8"],
        env=child_environment(str(tmp_path)),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = loads(child.stdout.splitlines()[-1])
    take, put, clear = found["take"], found["put"], found["clear"]
    for one in (take, put, clear):
        assert one["temporary_bytes"] < MIB
        assert one["collectives"] == []
        assert one["copied_elements"] < MIB
    assert put["aliased_bytes"] == clear["aliased_bytes"] == found["state_bytes"]
    # One slot's recurrent and convolution states, and hardly any cache rows.
    assert take["output_bytes"] < found["state_bytes"] / BATCH
