"""The shipped drafter's numbers against the published modules.

The golden values come from what entered the target's layers there, so every difference is the
drafter's own. A block of eight drafts has nine rows here, as the target verifies so many; the
published one has no row for the last draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mkc
from mkc.ir.builder import Trace
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.graph import Graph
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.reference import Evaluation
from mkc.ir.reference import Rounding
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.types import DType
from mkc.ir.verify import verify
from models.dspark import DRAFTER
from models.dspark import Config
from tests.generate_weights import digest
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_weights

CONTEXT = 64
BEFORE = 40  # positions that are remembered before the first round
BLOCK = 8
ROUNDS = {"round1": slice(BEFORE, 48), "round2": slice(48, 53)}
OBSERVED = ("hidden_norm", "embed_tokens", "norm", "lm_head")


def config(**changes: Any) -> Config:
    """The golden config; `sliding_window` is changed where it is."""
    found = spark_case().meta["config"] | {"drafts": BLOCK}
    trunk = dict(found["transformer_layer_config"])
    if "sliding_window" in changes:
        trunk["sliding_window"] = changes.pop("sliding_window")
    return Config.from_hf(found | {"transformer_layer_config": trunk} | changes)


def trace(drafter: Config, rows: int, *, fill: bool) -> Graph:
    """The drafter alone: remembers `rows` rows, and fills a block of as many if wanted."""
    record = Trace(name="drafter", rows=rows, batch=1, context=CONTEXT)
    width = len(drafter.target_layers) * drafter.target_hidden
    features = record.new_input("features", DType.BF16, rows, width)
    where = record.new_input("seen", DType.I32, rows)
    context = mkc.ContextStep(
        rows=rows, batch=1, context=CONTEXT, features=features, positions=where
    )
    anchor = record.new_input("anchor", DType.I32, 1)
    with recording(record):
        if not fill:
            DRAFTER.remember(drafter, context)
            return build(record, {"features": features})
        unused = mkc.param("unused", [1, 1])
        step = mkc.DraftStep(
            rows=rows,
            batch=1,
            remembered=context,
            anchor=anchor,
            positions=record.inputs["positions"],
            sampling=(),
            table=unused,
            head=unused,
        )
        drafts = DRAFTER.propose(drafter, step)
    assert drafts.candidates is None and drafts.proposal is None
    shown = {"tokens": drafts.tokens}
    if drafts.positions is not None:
        shown["positions"] = drafts.positions
    return build(record, shown)


def named(graph: Graph) -> dict[str, str]:
    """Values to observe: those of `OBSERVED`, what a layer ends with, and the confidence."""
    nodes = list(graph.body.nodes())
    *_, last = (
        node for node in nodes if isinstance(node.op, Binary) and node.op.function is BinaryKind.ADD
    )
    (walk,) = (node for node in nodes if isinstance(node.op, MarkovWalk))
    own = {"residual": last.results[0].name, "confidence": walk.results[1].name}
    return {**{name: name for name in OBSERVED}, **own}


def inputs(rows: slice, count: int, anchor: int = 0) -> dict[str, Any]:
    """Golden features of some positions, with padding up to `count` rows."""
    padding = count - (rows.stop - rows.start)
    taps = spark_case().expected["taps"][rows]
    positions = np.arange(rows.start, rows.stop)
    return {
        "features": np.pad(taps, ((0, padding), (0, 0))),
        "seen": np.pad(positions, (0, padding), constant_values=-1).astype(np.int32),
        "anchor": np.array([anchor], np.int32),
    }


@cache
def remembered(rounding: Rounding) -> Mapping[str, Any]:
    """States behind the first positions."""
    graph = trace(config(), BEFORE, fill=False)
    step = compile_step(graph, spark_weights(), rounding=rounding)
    block = np.arange(BEFORE)
    states = initial_states(graph, rounding)
    return step(block, block, states, inputs(slice(0, BEFORE), BEFORE)).states


@cache
def rounds(rounding: Rounding, **changes: Any) -> dict[str, Evaluation]:
    """Both golden rounds, the second one behind five more rows."""
    drafter = config(**changes)
    count = 1 + drafter.drafts
    graph = trace(drafter, count, fill=True)
    verify(graph)
    observe = list(named(graph).values())
    step = compile_step(graph, spark_weights(), rounding=rounding, observe=observe)
    states, found = remembered(rounding), {}
    for name, rows in ROUNDS.items():
        anchor = int(spark_case().expected[f"{name}.anchor"][0])
        positions = rows.stop + np.arange(count)
        given = inputs(rows, count, anchor)
        found[name] = step(np.zeros(count, np.int32), positions, states, given)
        states = found[name].states
    return found


def values(found: Evaluation, name: str, **changes: Any) -> NDArray[Any]:
    """An observed value of all executions, rows of the published block only."""
    key = named(trace(config(**changes), 1 + BLOCK, fill=True))[name]
    array = np.asarray(found.observed[key], np.float32)
    return array[:, :BLOCK]


def worst(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def test_the_weights_are_those_of_the_goldens() -> None:
    assert digest(spark_weights()) == spark_case().meta["weights_sha256"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("rounding", ["float32", "reference"])
def test_numbers_agree_with_the_published_modules(name: str, rounding: Rounding) -> None:
    """In f32 to ten times the error of f32, with roundings to twice that of bf16."""
    case, found = spark_case(), rounds(rounding)[name]
    kind = "f32" if rounding == "float32" else "bf16"
    expected, hidden = case.expected, case.tolerances[f"{kind}_hidden_abs"]
    rows = ROUNDS[name]
    context = values(found, "hidden_norm")[0, : rows.stop - rows.start]
    assert worst(context, expected[f"{name}.context"][rows]) < hidden
    scale = np.abs(expected[f"{name}.residual"]).max()
    residual = np.concatenate([values(found, "embed_tokens"), values(found, "residual")])
    assert worst(residual, expected[f"{name}.residual"]) < hidden * scale
    assert worst(values(found, "norm")[0], expected[f"{name}.hidden"]) < hidden
    logits = values(found, "lm_head")[0]
    assert worst(logits, expected[f"{name}.base_logits"]) < case.tolerances[f"{kind}_logits_abs"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("rounding", ["float32", "reference"])
def test_the_walk_is_the_published_one(name: str, rounding: Rounding) -> None:
    """Eight drafts, and how sure each is; a confidence is a sigmoid of a hidden state."""
    case, found = spark_case(), rounds(rounding)[name]
    walk = np.asarray(found.outputs["tokens"])
    assert walk[0] == case.expected[f"{name}.anchor"][0]
    assert walk[1:].tolist() == case.expected[f"{name}.tokens"].tolist()
    graph = trace(config(), 1 + BLOCK, fill=True)
    confidence = np.asarray(found.observed[named(graph)["confidence"]])[0]
    kind = "f32" if rounding == "float32" else "bf16"
    tolerance = case.tolerances[f"{kind}_hidden_abs"]
    assert worst(confidence[1:], case.expected[f"{name}.confidence"]) < tolerance
    assert confidence[0] == 1


def test_seven_drafts_are_the_first_seven() -> None:
    """A causal block of fewer rows has the same numbers."""
    for name in ROUNDS:
        few, all_ = (rounds("float32", drafts=one)[name].outputs["tokens"] for one in (7, 8))
        assert np.asarray(few).tolist() == np.asarray(all_)[:-1].tolist()


def test_the_markov_head_changes_the_walk() -> None:
    """Else a walk without it would pass the test above."""
    expected = spark_case().expected
    assert (expected["round1.base_logits"].argmax(-1) != expected["round1.tokens"]).sum() >= 3


def test_the_window_is_that_of_the_block() -> None:
    """All rows see the 32 positions before the block; counted from each row, they would not."""
    case, found = spark_case(), rounds("float32", sliding_window=32)["round2"]
    hidden = values(found, "norm", sliding_window=32)[0]
    tolerance = case.tolerances["f32_hidden_abs"]
    assert worst(hidden, case.expected["window32_block.hidden"]) < tolerance
    assert worst(hidden, case.expected["window32_row.hidden"]) > 1000 * tolerance
    walk = np.asarray(found.outputs["tokens"])[1:]
    assert walk.tolist() == case.expected["window32_block.tokens"].tolist()


@pytest.mark.parametrize("changes", [{"sliding_window": 33}, {"sliding_window": 31}])
def test_the_goldens_see_a_window_that_is_wrong_by_one(changes: dict[str, Any]) -> None:
    case, found = spark_case(), rounds("float32", **changes)["round2"]
    difference = worst(values(found, "norm", **changes)[0], case.expected["window32_block.hidden"])
    assert difference > 100 * case.tolerances["f32_hidden_abs"]


def test_doubtful_drafts_are_not_proposed() -> None:
    """The block ends in front of the first draft below the threshold."""
    threshold, ends = 0.5, []
    found = rounds("float32", confidence_threshold=threshold)
    for name, rows in ROUNDS.items():
        doubtful = spark_case().expected[f"{name}.confidence"] < threshold
        ends.append(int(np.argmax(doubtful)))
        positions = np.asarray(found[name].outputs["positions"])
        proposed = rows.stop + np.arange(1 + ends[-1])
        assert positions.tolist() == [*proposed, *[-1] * (BLOCK - ends[-1])]
    assert ends == [0, 4]
