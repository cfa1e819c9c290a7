"""An op from outside the tree does everything that a built-in op does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import mkc
from mkc.errors import ShapeError
from mkc.ir import ops
from mkc.ir.cost import Cost
from mkc.ir.cost import graph_cost
from mkc.ir.facets import EMIT
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.facets import SHARD
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.ir.ops import Op
from mkc.ir.reference import OpContext
from mkc.ir.reference import evaluate
from mkc.ir.reference import initial_states
from mkc.ir.register import BUILT_IN
from mkc.ir.register import STATE_KINDS
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.types import TensorType
from mkc.ir.verify import findings

type Types = tuple[TensorType, ...]
type Arrays = tuple[Array, ...]

VOCAB, HIDDEN = 16, 8


@dataclass(frozen=True, kw_only=True)
class Clamp(Op):
    """x -> min(max(x, low), high), like x."""

    mnemonic: ClassVar[str] = "test.clamp"
    low: float
    high: float = 1.0


def infer_clamp(op: Clamp, operands: Types, states: Types) -> Types:
    if op.low > op.high:
        raise ShapeError(
            op=op.mnemonic,
            location=None,
            expected="low at most high",
            got=f"{op.low} and {op.high}",
            hint="Swap them",
        )
    return (operands[0],)


def clamp(op: Clamp, operands: Arrays, states: Arrays, context: OpContext) -> tuple[Arrays, Arrays]:
    return (context.result(jnp.clip(operands[0], op.low, op.high)),), ()


def clamp_cost(op: Clamp, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(vector_elements=2 * operands[0].elements)


@pytest.fixture(autouse=True)
def clamp_is_registered() -> Iterator[None]:
    register_op(Clamp, infer=infer_clamp, reference=clamp, cost=clamp_cost)
    yield
    unregister_op(Clamp)


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Embedding, four layers that clamp, and the embedding table again as LM head."""
    table = mkc.param("embed.weight", [VOCAB, HIDDEN])
    h = mkc.embed(step.tokens, table)
    for layer in mkc.layers(4):
        (bounded,) = mkc.apply(Clamp(low=-0.5, high=0.25), h)
        h = bounded + layer.param("bias", [HIDDEN])
    return mkc.next_token(h, table)


def traced() -> Graph:
    return mkc.trace(decoder, name="clamped", batch=2, context=16)


def clamps(graph: Graph) -> list[Node]:
    return [node for node in graph.body.nodes() if isinstance(node.op, Clamp)]


def test_it_traces_and_verifies() -> None:
    graph = traced()
    assert [node.op for node in clamps(graph)] == [Clamp(low=-0.5, high=0.25)]
    assert findings(graph) == []


def test_its_types_are_checked() -> None:
    def wrong(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [VOCAB, HIDDEN])
        (h,) = mkc.apply(Clamp(low=2.0, high=1.0), mkc.embed(step.tokens, table))
        return mkc.next_token(h, table)

    with pytest.raises(ShapeError, match=r"test_register.py:\d+: test.clamp: expected low at most"):
        mkc.trace(wrong, name="wrong", batch=1, context=16)


def test_it_prints_and_parses() -> None:
    graph = traced()
    text = print_graph(graph)
    assert "test.clamp(" in text
    assert "{low = -0.5, high = 0.25}" in text
    assert parse(text) == graph
    short = text.replace("{low = -0.5, high = 0.25}", "{low = -0.5}")
    assert [node.op for node in clamps(parse(short))] == [Clamp(low=-0.5, high=1.0)]


def test_it_evaluates() -> None:
    graph = traced()
    table = np.linspace(-1, 1, VOCAB * HIDDEN, dtype=np.float32).reshape(VOCAB, HIDDEN)
    biases = {
        f"model.layers.{index}.bias": np.full(HIDDEN, index / 8, np.float32) for index in range(4)
    }
    tokens = np.array([3, 12])
    found = evaluate(
        graph,
        tokens=tokens,
        positions=np.zeros(2),
        params={"embed.weight": table, **biases},
        states=initial_states(graph),
        rounding="float32",
    )
    h = table[tokens]
    for index in range(4):
        h = np.clip(h, -0.5, 0.25) + index / 8
    np.testing.assert_allclose(found.outputs["logits"], h @ table.T, rtol=1e-5)


def test_its_cost_counts_in_every_layer() -> None:
    clamped = graph_cost(traced()).vector_elements
    unregister_op(Clamp)
    register_op(Clamp, infer=infer_clamp, reference=clamp)  # costs nothing without the facet
    assert clamped - graph_cost(traced()).vector_elements == 4 * 2 * 2 * HIDDEN


def test_sharding_emission_and_states_are_stored_when_given() -> None:
    def shard() -> None: ...

    def emit() -> None: ...

    unregister_op(Clamp)
    kinds = (StateKind.RECURRENT,)
    register_op(
        Clamp, infer=infer_clamp, reference=clamp, shard=shard, emit=emit, state_kinds=kinds
    )
    op = Clamp(low=0.0)
    assert SHARD.find(op) is shard
    assert EMIT.find(op) is emit
    assert STATE_KINDS[Clamp] == kinds


def test_unregistering_leaves_nothing() -> None:
    unregister_op(Clamp)
    assert Clamp.mnemonic not in MNEMONICS
    assert all(Clamp not in facet.table for facet in (INFER, REFERENCE, SHARD, EMIT))
    register_op(Clamp, infer=infer_clamp, reference=clamp)


def test_every_op_of_the_tree_is_built_in() -> None:
    defined = {
        one
        for one in vars(ops).values()
        if isinstance(one, type) and issubclass(one, Op) and one is not Op
    }
    assert defined == set(BUILT_IN)
    assert {op.mnemonic: op for op in BUILT_IN}.items() <= MNEMONICS.items()
    for facet in (INFER, REFERENCE):
        assert [op.__name__ for op in BUILT_IN if op not in facet.table] == []
