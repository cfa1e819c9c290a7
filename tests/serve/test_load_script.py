"""The load script, for a moment: clients that come, leave and talk nonsense."""

from __future__ import annotations

import asyncio

from bench.serve_load import run_load
from bench.serve_process import ServerProcess
from tests.serve.running import Running

SECONDS = 3.0


def test_a_short_load(tiny: Running) -> None:
    server = ServerProcess(port=int(tiny.url.rpartition(":")[2]), pid=None)
    result = asyncio.run(run_load(server, clients=8, seconds=SECONDS, seed=1, different=6))
    assert result.problems == []
    assert set(result.counts) == {"completed", "left", "refused"}
    assert tiny.engine.running == tiny.engine.waiting == 0
