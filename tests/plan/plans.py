"""Plans as `mkc compile` writes them, made once for all tests."""

from __future__ import annotations

from functools import cache
from json import dumps
from json import loads
from pathlib import Path

from mkc.cli.output import json_text
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.ir.graph import Graph
from mkc.plan.folder import PlanFolder
from tests.draft_goldens import golden_round
from tests.passes.kimi import small_kimi
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph
from tests.passes.overlapped import overlapped_graph


@cache
def compiled(name: str, *, ranks: int, batch: int = 1, rounds: int = 1) -> CompileResult:
    """A graph below or a golden case, without ahead-of-time compilation."""
    graphs = {
        "27b": full_size,
        "dense": dense_graph,
        "round": greedy_round,
        "kimi": kimi_graph,
        "overlapped": overlapped_graph,
    }
    graph = graphs[name](batch=batch) if name in graphs else golden_graph(name, batch=batch)
    request = CompileRequest(
        graph=graph, target=TARGET, tp=ranks, rounds_per_launch=rounds, aot=False
    )
    return compile_graph(request)


def kimi_graph(*, batch: int) -> Graph:
    """Four layers of the golden model, in regions that share names of parameters."""
    return small_kimi(layers=4, latent=(4,), dense=1, batch=batch)


def greedy_round(*, batch: int) -> Graph:
    """A round of the golden target and drafter."""
    return golden_round(batch=batch, sampling=False).graph


@cache
def plan(name: str, *, ranks: int, batch: int = 1, rounds: int = 1) -> PlanFolder:
    """The plan as it is read back."""
    result = compiled(name, ranks=ranks, batch=batch, rounds=rounds)
    return PlanFolder(
        path=Path("plan"),
        plan=loads(dumps(result.plan)),
        report=loads(dumps(result.report)),
        kernel_source=result.kernel_source,
    )


def write_plan(folder: Path, name: str, *, ranks: int, batch: int = 1) -> Path:
    """Writes what a reader of plan folders needs."""
    result = compiled(name, ranks=ranks, batch=batch)
    folder.mkdir()
    (folder / "plan.json").write_text(json_text(result.plan))
    (folder / "report.json").write_text(json_text(result.report))
    (folder / "kernel.py").write_text(result.kernel_source)
    return folder
