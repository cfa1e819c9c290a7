"""What a backend with a scheme runs on TPUs: launches, late commits and prompts, in place."""

from __future__ import annotations

import subprocess
import sys
from json import loads
from pathlib import Path

from mkc.codegen_pallas.aot import child_environment

MIB = 1 << 20


def test_everything_is_compiled_and_changes_states_in_place(tmp_path: Path) -> None:
    """Two sequences on two devices: one launch for whole rounds, nothing beside it, and no copy of
    a state anywhere."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.tpu_aot.rounds_aot", "tpu7x:1x1x1", "2"],
        env=child_environment(str(tmp_path)),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = loads(child.stdout.splitlines()[-1])
    launch, commit, prefill = found["launch"], found["commit"], found["prefill"]
    assert launch["launches"] == 1
    assert launch["other_ops"] == []
    assert launch["aliased_bytes"] >= found["updated_bytes"] > 0
    assert found["relayouts"] == []
    for one in (commit, prefill):
        assert one["aliased_bytes"] == one["state_bytes"] > 0
        assert one["copied_elements"] < one["state_bytes"] / 16, "more than a convolution history"
    assert commit["temporary_bytes"] < MIB
