"""What a session launches on TPUs is the very function that is compiled ahead of time."""

from __future__ import annotations

import subprocess
import sys
from json import loads
from pathlib import Path

from mkc.codegen_pallas.aot import child_environment


def test_a_session_launches_what_is_compiled_ahead(tmp_path: Path) -> None:
    """Several rounds, masks and logits on two devices: the same program, one launch, states in
    place, and operands placed as it wants them."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.tpu_aot.session_aot", "tpu7x:1x1x1", "3", "4"],
        env=child_environment(str(tmp_path)),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    found = loads(child.stdout.splitlines()[-1])
    assert found["same"]
    assert found["launches"] == 1
    assert found["other_ops"] == []
    assert found["aliased_bytes"] >= found["updated_bytes"] > 0
    assert found["relayouts"] == []
