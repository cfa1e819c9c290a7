"""What an op costs, in units that no chip changes: bytes, blocks, element operations.

The schedule turns them into time with the numbers of a target. Costs are for the types in the
graph: those of one rank after sharding, those of the whole model before it. A cost facet counts
`weight_bytes` only for an op that reads a part of its parameter; `node_cost` adds whole parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace

from mkc.ir.facets import COST
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.ops import Activation
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
from mkc.ir.ops import Cast
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Embed
from mkc.ir.ops import L2Norm
from mkc.ir.ops import Linear
from mkc.ir.ops import MaskTokens
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import NormRounding
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import ShardedArgmax
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary
from mkc.ir.types import Axis
from mkc.ir.types import Part
from mkc.ir.types import TensorType

MXU_BLOCK = 256  # the unit in which matrix work is counted; a target says what one block costs

type Types = Sequence[TensorType]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Work of one or more ops in one step.

    Attributes:
      weight_bytes: parameter bytes read.
      state_read_bytes: state bytes read, for a full context.
      state_write_bytes: state bytes written.
      mxu_pushes: 256 x 256 blocks of the stationary operand, whatever the number of rows.
      vector_elements: elements x element-wise operations; a transcendental counts as one.
      flops: multiplications and additions of matrix and recurrent work, each counted once.
    """

    weight_bytes: int = 0
    state_read_bytes: int = 0
    state_write_bytes: int = 0
    mxu_pushes: int = 0
    vector_elements: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        )

    def times(self, count: int) -> Cost:
        """The cost of `count` executions."""
        return Cost(**{one.name: getattr(self, one.name) * count for one in fields(self)})


def blocks(rows: int, columns: int) -> int:
    """256 x 256 blocks that cover a matrix."""
    return -(-rows // MXU_BLOCK) * -(-columns // MXU_BLOCK)


def node_cost(graph: Graph, node: Node, types: dict[str, TensorType] | None = None) -> Cost:
    """Cost of one execution of `node`; zero for an op without a cost facet.

    Args:
      types: types of all values, when the caller has them (`value_types`).
    """
    cost = COST.find(node.op)
    if cost is None:
        return Cost()
    known = value_types(graph) if types is None else types
    operands = [
        graph.params[name].type if name in graph.params else known[name] for name in node.operands
    ]
    states = [_for_batch(graph.states[key].type, graph.batch) for key in node.states]
    result = cost(node.op, operands, states, [value.type for value in node.results])
    assert isinstance(result, Cost), f"cost of {node.op.mnemonic} is {result!r}, not a Cost"
    if result.weight_bytes:
        return result
    whole = (graph.params[name].type.bytes for name in node.operands if name in graph.params)
    return replace(result, weight_bytes=sum(whole))


def graph_cost(graph: Graph) -> Cost:
    """Cost of one step: every node as often as it runs."""
    types = value_types(graph)

    def block_cost(block: Block) -> Cost:
        total = Cost()
        for item in block.items:
            if isinstance(item, Repeat):
                total += block_cost(item.body).times(item.count)
            else:
                total += node_cost(graph, item, types)
        return total

    return block_cost(graph.body)


def value_types(graph: Graph) -> dict[str, TensorType]:
    """Types of all values by name: inputs, results, and the carries of repeat regions."""
    types = {value.name: value.type for value in graph.inputs}

    def add(values: Sequence[Value]) -> None:
        types.update({value.name: value.type for value in values})

    def walk(block: Block) -> None:
        for item in block.items:
            if isinstance(item, Repeat):
                add([carry.argument for carry in item.carries])
                walk(item.body)
                add([carry.result for carry in item.carries])
            else:
                add(item.results)

    walk(graph.body)
    return types


def _for_batch(state: TensorType, batch: int) -> TensorType:
    """A state's type for all sequences: [batch, ...]."""
    return replace(state, axes=(Axis(parts=(Part(count=batch),), name="batch"), *state.axes))


def _bytes(types: Types) -> int:
    return sum(one.bytes for one in types)


@COST.register(Embed)
def _embed(op: Embed, operands: Types, states: Types, results: Types) -> Cost:
    # Only the rows of the tokens are read, not the table.
    return Cost(weight_bytes=results[0].bytes)


@COST.register(RmsNorm)
def _rms_norm(op: RmsNorm, operands: Types, states: Types, results: Types) -> Cost:
    # Square, sum, scale, weight; one more rounding when the weight comes after it.
    operations = 4 + (op.rounding is NormRounding.TWICE)
    return Cost(vector_elements=operations * operands[0].elements)


@COST.register(L2Norm)
def _l2_norm(op: L2Norm, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(vector_elements=3 * operands[0].elements)


@COST.register(Linear)
def _linear(op: Linear, operands: Types, states: Types, results: Types) -> Cost:
    x, weight = operands
    rows, inner = x.shape
    outer = weight.shape[0]
    return Cost(
        mxu_pushes=blocks(inner, outer),
        vector_elements=results[0].elements,
        flops=2 * rows * inner * outer,
    )


@COST.register(SplitHeads)
@COST.register(MergeHeads)
@COST.register(SplitParts)
@COST.register(Slice)
def _no_work(op: SplitHeads, operands: Types, states: Types, results: Types) -> Cost:
    # A choice of addresses; moving between lanes, where it happens, belongs to the emission.
    return Cost()


@COST.register(RotaryTable)
def _rotary_table(op: RotaryTable, operands: Types, states: Types, results: Types) -> Cost:
    # Angle, cosine and sine of every pair.
    return Cost(vector_elements=3 * results[0].elements)


@COST.register(Rotary)
def _rotary(op: Rotary, operands: Types, states: Types, results: Types) -> Cost:
    x, cos, _ = operands
    rotated = x.elements // x.shape[-1] * 2 * cos.shape[-1]
    return Cost(vector_elements=3 * rotated)  # two products and their sum


@COST.register(CausalConv)
def _causal_conv(op: CausalConv, operands: Types, states: Types, results: Types) -> Cost:
    u = operands[0]
    operations = 2 * op.taps + (op.activation is not Activation.NONE)
    return Cost(
        state_read_bytes=_bytes(states),
        state_write_bytes=_bytes(states),
        vector_elements=operations * u.elements,
        flops=2 * op.taps * u.elements,
    )


@COST.register(DeltaRule)
def _delta_rule(op: DeltaRule, operands: Types, states: Types, results: Types) -> Cost:
    value = operands[2]
    rows = value.shape[0]
    key_dim = operands[0].shape[-1]
    state_elements = rows * value.shape[1] * key_dim * value.shape[2]
    # Decay one; S^T k, the update and S^T q two each.
    return Cost(
        state_read_bytes=_bytes(states),
        state_write_bytes=_bytes(states),
        vector_elements=7 * state_elements + 3 * value.elements,
        flops=7 * state_elements,
    )


@COST.register(Attention)
def _attention(op: Attention, operands: Types, states: Types, results: Types) -> Cost:
    q, k, v = operands[:3]
    rows, query_heads, dim = q.shape
    batch, context, kv_heads, _ = states[0].shape
    scores = rows * query_heads * context
    # The caches are the stationary operands: one block per 256 positions, sequence and key head.
    pushes = batch * kv_heads * (blocks(dim, context) + blocks(context, v.shape[-1]))
    return Cost(
        state_read_bytes=_bytes(states),
        state_write_bytes=k.bytes + v.bytes,
        mxu_pushes=pushes,
        vector_elements=4 * scores,  # scale, maximum, exponential, sum
        flops=2 * scores * (dim + v.shape[-1]),
    )


@COST.register(Unary)
@COST.register(Binary)
@COST.register(Scale)
@COST.register(Cast)
@COST.register(Argmax)
@COST.register(ShardedArgmax)
@COST.register(MaskTokens)
def _element_wise(op: Unary, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(vector_elements=operands[0].elements)


@COST.register(AllReduce)
def _all_reduce(op: AllReduce, operands: Types, states: Types, results: Types) -> Cost:
    # Every rank adds up what it gets; bytes on the links are the collective's, not the op's.
    return Cost(vector_elements=op.ranks * operands[0].elements)
