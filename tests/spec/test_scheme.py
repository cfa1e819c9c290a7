"""What schemes make: graphs that verify, print and parse; states; what a scheme refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

import mkc
from mkc.errors import UnsupportedOpError
from mkc.ir.cost import graph_cost
from mkc.ir.graph import Graph
from mkc.ir.graph import StateKind
from mkc.ir.ops import Argmax
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Op
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import NextPositions
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import Tap
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.verify import findings
from mkc.spec import Round
from mkc.spec.commit import commit_late
from models.qwen38 import MODEL
from tests.draft_goldens import draft_case
from tests.draft_goldens import golden_plain
from tests.draft_goldens import golden_round
from tests.goldens import golden_case

SCHEMES = [golden_plain, golden_round]
CONFIG = golden_case("qwen38_mini").meta["config"]


@pytest.mark.parametrize("make", SCHEMES)
def test_graphs_verify_and_survive_the_text_form(make: Callable[..., Round]) -> None:
    scheme = make(batch=2)
    for graph in (scheme.graph, scheme.prefill):
        assert findings(graph) == []
        assert parse(print_graph(graph)) == graph
        assert graph_cost(graph).weight_bytes > 0
    inputs = {one.name for one in scheme.graph.inputs}
    assert set(scheme.carried) <= inputs & scheme.graph.outputs.keys()


def test_without_a_drafter_a_step_chooses_and_commits_late() -> None:
    """The model's own step, but for the choice of the token and what waits for it."""
    scheme, graph = golden_plain(), MODEL.trace(CONFIG, batch=1, context=128)
    assert scheme.drafts == 0
    assert scheme.prefill == graph
    lasting = {k: one for k, one in scheme.graph.states.items() if one.kind is not StateKind.KEPT}
    assert lasting == graph.states
    late = {CausalConv: KeptConv, DeltaRule: KeptDeltaRule}
    plain = [type(node.op) for node in graph.body.nodes()]
    expected = [late.get(one, one) for one in plain if one is not Argmax]
    ops = [type(node.op) for node in scheme.graph.body.nodes()]
    assert ops == [*expected, Accept, NextPositions]


def test_recurrent_layers_commit_late_and_prompts_do_not() -> None:
    scheme = golden_round(batch=2)
    kinds = [type(node.op) for node in scheme.graph.body.nodes()]
    assert (kinds.count(KeptConv), kinds.count(KeptDeltaRule)) == (1, 1)
    assert CausalConv not in kinds
    assert DeltaRule not in kinds
    prefill = [type(node.op) for node in scheme.prefill.body.nodes()]
    assert (prefill.count(CausalConv), prefill.count(DeltaRule)) == (1, 1)


def test_kept_rows_are_small() -> None:
    """Eight rows of k, u, decay and inputs: less than a hundredth of eight copies of the state."""
    config, states = CONFIG["text_config"], golden_round().graph.states.values()
    kept = {one.key.rpartition("kept_")[2]: one for one in states if one.kind is StateKind.KEPT}
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    sizes = {name: one.type.elements // 8 for name, one in kept.items()}
    heads = config["linear_num_value_heads"]
    assert sizes == {"k": key, "u": value, "decay": heads, "inputs": 2 * key + value}
    assert all(one.type.shape[0] == 8 and one.instances == 6 for one in kept.values())


def reader(graph: Graph) -> tuple[ReadTaps, tuple[str, ...]]:
    """What reads the taps, and their states."""
    ((op, states),) = (
        (one.op, one.states) for one in graph.body.nodes() if isinstance(one.op, ReadTaps)
    )
    return op, states


def test_only_what_is_read_is_shown() -> None:
    """Taps of layers 1, 4 and 6, which are all linear; those of the other kind are gone."""
    graph = golden_round().graph
    shown = [one for one in graph.states.values() if one.kind is StateKind.TAP]
    assert [one.indices for one in shown] == [(0, 1, 2, 4, 5, 6)]
    taps = [node for node in graph.body.nodes() if isinstance(node.op, Tap)]
    op, states = reader(graph)
    assert [one.states for one in taps] == [states]
    assert (op.numbers, op.instances) == ((0, 0, 0), (1, 3, 5))


def test_taps_of_both_kinds_of_layers_in_the_drafters_order() -> None:
    draft = draft_case().meta["config"]["dflash_config"] | {"target_layer_ids": [7, 4, 3]}
    graph = golden_round(dflash_config=draft).graph
    op, states = reader(graph)
    indices = [graph.states[key].indices for key in states]
    found = [
        indices[number][instance] for number, instance in zip(op.numbers, op.instances, strict=True)
    ]
    assert found == [7, 4, 3]


def test_a_model_has_no_taps_by_itself() -> None:
    graph = MODEL.trace(CONFIG, batch=1, context=64)
    assert StateKind.TAP not in {one.kind for one in graph.states.values()}


@dataclass(frozen=True, kw_only=True)
class Counter(Op):
    """A state of the user's own kind of layer."""

    mnemonic: ClassVar[str] = "test.counter"


def test_an_op_that_cannot_commit_late_is_named() -> None:
    register_op(
        Counter,
        infer=lambda op, operands, states: operands,
        reference=lambda op, operands, states, context: (operands, states),
        state_kinds=[StateKind.RECURRENT],
    )

    def decoder(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("table", [16, 8])
        h = mkc.embed(step.tokens, table)
        for layer in mkc.layers(1):
            (h,) = mkc.apply(Counter(), h, states=[layer.state("count", "recurrent", [8])])
        return mkc.next_token(h, table)

    try:
        graph = mkc.trace(decoder, name="counts", batch=1, context=8, rows_per_sequence=4)
        with pytest.raises(UnsupportedOpError, match=r"test\.counter.*late commit"):
            commit_late(graph, kept="kept")
    finally:
        unregister_op(Counter)
