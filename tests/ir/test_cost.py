"""Costs: the numbers of every kind of op, by hand, and their sum over a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mkc.ir.cost import Cost
from mkc.ir.cost import blocks
from mkc.ir.cost import graph_cost
from mkc.ir.cost import node_cost
from mkc.ir.facets import COST
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.ops import Activation
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import L2Norm
from mkc.ir.ops import NormRounding
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import Unary
from mkc.ir.register import BUILT_IN
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import tensor
from tests.ir.small_graph import CONTEXT
from tests.ir.small_graph import DIM
from tests.ir.small_graph import HEADS
from tests.ir.small_graph import HIDDEN
from tests.ir.small_graph import ROWS
from tests.ir.small_graph import TAPS
from tests.ir.small_graph import VOCAB
from tests.ir.small_graph import small_graph

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32


def of(
    op: Op, operands: list[TensorType], results: list[TensorType], states: Sequence[TensorType] = ()
) -> Cost:
    cost = COST.find(op)
    assert cost is not None
    found = cost(op, operands, states, results)
    assert isinstance(found, Cost)
    return found


def node(graph: Graph, result: str) -> Node:
    return next(one for one in graph.body.nodes() if one.results[0].name == result)


def test_every_built_in_op_has_a_cost() -> None:
    assert [op.__name__ for op in BUILT_IN if op not in COST.table] == []


def test_blocks_cover_a_matrix() -> None:
    assert blocks(256, 256) == 1
    assert blocks(257, 256) == 2
    assert blocks(5120, 17408) == 20 * 68


def test_linear_reads_its_weight_once() -> None:
    graph = small_graph()
    assert node_cost(graph, node(graph, "logits")) == Cost(
        weight_bytes=VOCAB * HIDDEN * 2,
        mxu_pushes=1,
        vector_elements=ROWS * VOCAB,
        flops=2 * ROWS * HIDDEN * VOCAB,
    )


def test_embedding_reads_one_row_per_token() -> None:
    graph = small_graph()
    assert node_cost(graph, node(graph, "h")) == Cost(weight_bytes=ROWS * HIDDEN * 2)


def test_attention_reads_the_whole_cache_and_writes_one_position() -> None:
    graph = small_graph()
    position_bytes = 2 * HEADS * DIM * 2  # key and value of one position, bf16
    assert node_cost(graph, node(graph, "attended")) == Cost(
        state_read_bytes=graph.batch * CONTEXT * position_bytes,
        state_write_bytes=graph.batch * position_bytes,
        mxu_pushes=graph.batch * HEADS * 2,
        vector_elements=4 * ROWS * HEADS * CONTEXT,
        flops=4 * ROWS * HEADS * CONTEXT * DIM,
    )


def test_attention_blocks_grow_with_context() -> None:
    graph = small_graph()
    caches = {
        key: replace(graph.states[key], type=tensor(BF16, 1024, HEADS, DIM))
        for key in ("keys", "values")
    }
    long = replace(graph, states={**graph.states, **caches})
    assert node_cost(long, node(long, "attended")).mxu_pushes == graph.batch * HEADS * 2 * 4


def test_convolution_rewrites_its_history() -> None:
    graph = small_graph()
    history_bytes = graph.batch * (TAPS - 1) * HIDDEN * 2
    assert node_cost(graph, node(graph, "mixed")) == Cost(
        weight_bytes=HIDDEN * TAPS * 2,
        state_read_bytes=history_bytes,
        state_write_bytes=history_bytes,
        vector_elements=(2 * TAPS + 1) * ROWS * HIDDEN,
        flops=2 * TAPS * ROWS * HIDDEN,
    )
    u, weight = tensor(BF16, ROWS, HIDDEN), tensor(BF16, HIDDEN, 1, TAPS)
    bare = of(CausalConv(taps=TAPS, activation=Activation.NONE), [u, weight], [u])
    assert bare.vector_elements == 2 * TAPS * ROWS * HIDDEN


def test_delta_rule_rewrites_its_state() -> None:
    q, v, gate = tensor(F32, 2, 2, 16), tensor(BF16, 2, 4, 8), tensor(F32, 2, 4)
    state = tensor(F32, 2, 4, 16, 8)  # two sequences
    assert of(DeltaRule(), [q, q, v, gate, gate], [v], [state]) == Cost(
        state_read_bytes=state.bytes,
        state_write_bytes=state.bytes,
        vector_elements=7 * state.elements + 3 * v.elements,
        flops=7 * state.elements,
    )


@pytest.mark.parametrize(
    ("op", "operands", "result", "operations"),
    [
        (L2Norm(eps=1e-6), [tensor(BF16, 2, 16)], tensor(F32, 2, 16), 3),
        (Unary(function=Activation.SILU), [tensor(BF16, 2, 16)], tensor(BF16, 2, 16), 1),
        (
            Binary(function=BinaryKind.MUL),
            [tensor(BF16, 2, 16), tensor(BF16, 2, 16)],
            tensor(BF16, 2, 16),
            1,
        ),
        (AllReduce(ranks=8), [tensor(F32, 2, 16)], tensor(BF16, 2, 16), 8),
        (SplitHeads(), [tensor(BF16, 2, 16)], tensor(BF16, 2, 2, 8), 0),
    ],
)
def test_element_wise_work(
    op: Op, operands: list[TensorType], result: TensorType, operations: int
) -> None:
    assert of(op, operands, [result]) == Cost(vector_elements=operations * 32)


def test_parameter_of_any_op_is_read() -> None:
    graph = small_graph()
    norm = node(graph, "normed")
    assert node_cost(graph, norm).weight_bytes == HIDDEN * 2
    scaled = replace(norm, op=Binary(function=BinaryKind.MUL))
    assert node_cost(graph, scaled).weight_bytes == HIDDEN * 2
    on_values = replace(scaled, operands=("h.conv", "h.conv"))
    assert node_cost(graph, on_values).weight_bytes == 0


def test_norm_that_rounds_twice_does_one_operation_more() -> None:
    x, weight = tensor(BF16, 2, 16), tensor(BF16, 16)
    once = of(RmsNorm(eps=1e-6), [x, weight], [x])
    twice = of(RmsNorm(eps=1e-6, rounding=NormRounding.TWICE), [x, weight], [x])
    assert once == Cost(vector_elements=4 * 32)
    assert twice == Cost(vector_elements=5 * 32)


def test_rotary_works_on_the_rotated_channels_only() -> None:
    x, table = tensor(BF16, 2, 4, 16), tensor(BF16, 2, 4)
    assert of(Rotary(), [x, table, table], [x]) == Cost(vector_elements=3 * 2 * 4 * 8)
    positions = tensor(I32, 2)
    made = of(RotaryTable(theta=1e4, dim=8), [positions], [table, table])
    assert made == Cost(vector_elements=3 * 2 * 4)


def test_cost_of_a_graph_counts_every_execution() -> None:
    graph = small_graph()
    per_node = {one.results[0].name: node_cost(graph, one) for one in graph.body.nodes()}
    runs = {"normed": 4, "mixed": 4, "h.added": 4, "h": 1, "logits": 1, "next": 1}
    total = Cost()
    for name, cost in per_node.items():
        total += cost.times(runs.get(name, 2))
    assert graph_cost(graph) == total
    # Every parameter once per layer, but the embedding only by the rows it looks up.
    params = sum(param.type.bytes * param.instances for param in graph.params.values())
    assert graph_cost(graph).weight_bytes == params + ROWS * HIDDEN * 2


def test_costs_add_field_by_field() -> None:
    one = Cost(weight_bytes=1, state_read_bytes=2, state_write_bytes=3, mxu_pushes=4, flops=5)
    assert one + one == one.times(2)
    assert one + Cost() == one
    assert one.times(0) == Cost()
