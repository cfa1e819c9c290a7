"""Programs of several rounds per launch."""

from __future__ import annotations

from functools import cache

from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.program import Program
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph


@cache
def several_rounds(name: str, ranks: int, rounds: int, passes: str = "") -> Program:
    """A named graph, as in `lowered`, for launches of several rounds."""
    graph = full_size() if name == "27b" else golden_graph(name)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(rounds=rounds)).override(passes)
    return pipeline.run(graph, load_target(TARGET)).program
