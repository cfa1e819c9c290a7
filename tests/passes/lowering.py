"""Graphs to lower and one way to lower them, for the tests of passes, programs and packing."""

from __future__ import annotations

from functools import cache
from json import loads
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

import mkc
from mkc.ir.graph import Graph
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.report import plan_document
from mkc.report import report_document
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.simulate import predict
from mkc.schedule.verify import prove
from mkc.targets import load_target
from models.examples import dense
from models.qwen38 import MODEL
from tests.goldens import golden_case

TARGET = "tpu7x:2x2x1"
CONFIG = Path(__file__).parents[2] / "models" / "configs" / "qwen38_27b.json"


def lower(graph: Graph, ranks: int, passes: str = "") -> Lowered:
    """All passes, logits included; `passes` is the text of options."""
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True)).override(passes)
    return pipeline.run(graph, load_target(TARGET))


@cache
def full_size(*, batch: int = 1, context: int = 4096, layers: int = 64) -> Graph:
    """The 27B model: 16 times three recurrent layers and one of attention, or more of them."""
    config = loads(CONFIG.read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = layers
    text["layer_types"] = (text["layer_types"] * (layers // 64))[:layers]
    return MODEL.trace(config, batch=batch, context=context)


@cache
def golden_graph(name: str, *, batch: int = 1) -> Graph:
    return golden_case(name).graph(batch=batch)


@cache
def dense_graph(*, batch: int = 1, context: int = 256) -> Graph:
    """The dense example of `models/examples`: one loop of eight equal layers."""
    return mkc.trace(dense.decoder, name="dense", batch=batch, context=context)


@cache
def lowered(name: str, ranks: int, batch: int = 1) -> Lowered:
    """A named graph (`27b`, `dense` or a golden case), lowered once for all tests."""
    graphs = {"27b": full_size, "dense": dense_graph}
    graph = graphs[name](batch=batch) if name in graphs else golden_graph(name, batch=batch)
    return lower(graph, ranks)


def report(lowered: Lowered) -> dict[str, Any]:
    """report.json of a program that no compiler has seen."""
    target, program = load_target(TARGET), lowered.program
    return report_document(
        lowered,
        target,
        None,
        {},
        predicted=predict(program, target),
        proof=prove([program] * program.ranks, target),
        plan=plan_document(lowered, target, cycles={}),
    )


def two_dense_layers() -> Lowered:
    """The dense example cut to two layers: small enough to be read as a golden file."""
    with MonkeyPatch.context() as patch:
        patch.setattr(dense, "LAYERS", 2)
        return lower(mkc.trace(dense.decoder, name="dense", batch=1, context=256), 1)


CASES = [
    ("27b", 8),
    *((name, ranks) for name in ("qwen38_mini", "qwen38_lane", "dense") for ranks in (1, 2, 8)),
]


def phase_of(program: Program, kind: type[Phase], words: str = "") -> Phase:
    """The first phase of a kind whose title holds `words`."""
    return next(one for one in program.phases() if isinstance(one, kind) and words in one.title)
