"""A kernel's session over two processes: the same bits as over two devices of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.distributed_kernel_program import RANKS
from tests.runtime.distributed_kernel_program import SMALL
from tests.runtime.distributed_kernel_program import kernel_backend
from tests.runtime.distributed_kernel_program import use
from tests.runtime.processes import START_SECONDS
from tests.runtime.processes import free_port
from tests.runtime.processes import job

PROGRAM = "tests.runtime.distributed_kernel_program"


@pytest.mark.parametrize(
    "name", [SMALL, pytest.param("qwen38_lane", marks=pytest.mark.long, id="recurrent")]
)
def test_everything_around_a_launch(tmp_path: Path, name: str) -> None:
    expected = use(kernel_backend(name))
    port = free_port()
    commands = [
        [PROGRAM, f"localhost:{port}", str(RANKS), str(number), name] for number in range(RANKS)
    ]
    with job(tmp_path / "job", commands) as running:
        assert running.wait(3 * START_SECONDS) == [0] * RANKS, running.stderr(0)
        assert json.loads(running.stdout(0)) == expected
