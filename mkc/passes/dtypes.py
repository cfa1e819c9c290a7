"""Element types that the kernel computes with; a graph can say more than the matrix unit can do.

A matrix product takes bf16 on both sides. Rounding an f32 operand silently would not be what the
graph says, so the author has to say it.
"""

from __future__ import annotations

from mkc.errors import ShapeError
from mkc.ir import ops
from mkc.ir import ops_markov
from mkc.ir import ops_spec
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.types import DType
from mkc.ir.types import TensorType

# Operands that the matrix unit or a bf16 table needs in bf16.
BF16_OPERANDS: dict[type[ops.Op], tuple[tuple[int, str], ...]] = {
    ops.Embed: ((1, "table"),),
    ops.Linear: ((0, "x"), (1, "weight")),
    ops.Attention: ((0, "q"),),
    ops_spec.BlockAttention: ((0, "q"),),
    ops_markov.MarkovWalk: ((1, "predecessor"), (2, "successor")),
    ops_spec.SelectorWalk: ((3, "predecessor"), (4, "successor")),
    ops_spec.Tap: ((0, "x"),),
}
STATE_DTYPES = {
    StateKind.KV_CACHE: DType.BF16,
    StateKind.CONV: DType.BF16,
    StateKind.RECURRENT: DType.F32,
    StateKind.TAP: DType.BF16,
}
# Rows that are kept to be committed have the dtype that their op computes with.


def check_dtypes(graph: Graph) -> None:
    """Raises `ShapeError` for an operand or state whose dtype the kernel has no memory for."""
    types = {value.name: value.type for value in _values(graph)}
    types |= {key: param.type for key, param in graph.params.items()}
    for node in graph.body.nodes():
        for index, name in BF16_OPERANDS.get(type(node.op), ()):
            _require(node, name, types[node.operands[index]], DType.BF16)
        for key in node.states:
            state = graph.states[key]
            if state.kind in STATE_DTYPES:
                _require(node, f"state {state.pattern}", state.type, STATE_DTYPES[state.kind])


def _require(node: Node, name: str, type: TensorType, dtype: DType) -> None:
    if type.dtype is not dtype:
        raise ShapeError(
            op=node.op.mnemonic,
            location=node.location,
            expected=f"{name} in {dtype}, which is what the kernel computes it with",
            got=str(type),
            hint=f"Declare it in {dtype}, or round it with mkc.cast before the operation",
        )


def _values(graph: Graph) -> list[Value]:
    found = list(graph.inputs)
    blocks = [graph.body]
    while blocks:
        for item in blocks.pop().items:
            if isinstance(item, Repeat):
                blocks.append(item.body)
                found += [value for one in item.carries for value in (one.argument, one.result)]
            else:
                found += item.results
    return found
