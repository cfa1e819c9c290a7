"""States that are committed late: a step's rows are kept, and how many of them count is said later.

Under speculation the rows of a round may be rejected. A cache forgets them by position. A recurrent
state would have to be saved for every row; instead its op keeps what the update needs of each row,
and the next round first applies the rows that were accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

from mkc.errors import UnsupportedOpError
from mkc.ir.cost import value_types
from mkc.ir.facets import Facet
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Op
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

ROLLED_BACK = (StateKind.RECURRENT, StateKind.CONV)


@dataclass(frozen=True, kw_only=True)
class LateCommit:
    """An op that does the same and commits late.

    Attributes:
      op: takes one more operand, how many rows of the last step count, i32 [batch].
      rows: what it keeps, by name: the type of ONE row.
    """

    op: Op
    rows: Mapping[str, TensorType]


COMMIT = Facet(name="late commit")  # (op, operand types) -> LateCommit


@COMMIT.register(CausalConv)
def _causal_conv(op: CausalConv, operands: tuple[TensorType, ...]) -> LateCommit:
    return LateCommit(
        op=KeptConv(taps=op.taps, activation=op.activation), rows={"inputs": _row(operands[0])}
    )


@COMMIT.register(DeltaRule)
def _delta_rule(op: DeltaRule, operands: tuple[TensorType, ...]) -> LateCommit:
    _, k, v, _, decay = operands
    rows = {"k": _row(k), "u": _row(v), "decay": _row(decay)}
    f32 = {name: replace(one, dtype=DType.F32) for name, one in rows.items()}
    return LateCommit(op=KeptDeltaRule(dtype=op.dtype), rows=f32)


def _row(type_: TensorType) -> TensorType:
    return replace(type_, axes=type_.axes[1:])


def commit_late(graph: Graph, *, kept: str) -> Graph:
    """`graph` with every op that cannot be rolled back replaced.

    Args:
      kept: name of the input that says how many rows of the last step count.

    Raises:
      UnsupportedOpError: an op has such a state and no late commit.
    """
    states = dict(graph.states)
    types = value_types(graph) | {key: one.type for key, one in graph.params.items()}

    def changed(block: Block) -> Block:
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                items.append(replace(item, body=changed(item.body)))
            else:
                items.append(node(item))
        return Block(items=tuple(items))

    def node(one: Node) -> Node:
        if not any(states[key].kind in ROLLED_BACK for key in one.states):
            return one
        find = COMMIT.find(one.op)
        if find is None:
            raise UnsupportedOpError(op=one.op.mnemonic, facet=COMMIT.name, location=one.location)
        late: LateCommit = find(one.op, tuple(types[name] for name in one.operands))
        owner = states[one.states[0]]
        added = {
            f"{owner.key}.kept_{name}": _kept(owner, name, row, graph.rows_per_sequence)
            for name, row in late.rows.items()
        }
        states.update(added)
        return replace(
            one, op=late.op, operands=(*one.operands, kept), states=(*one.states, *added)
        )

    body = changed(graph.body)
    return replace(graph, body=body, states=states)


def _kept(owner: State, name: str, row: TensorType, rows: int) -> State:
    return State(
        key=f"{owner.key}.kept_{name}",
        pattern=f"{owner.pattern}.kept_{name}",
        kind=StateKind.KEPT,
        type=replace(row, axes=(axis(rows, "rows"), *row.axes)),
        indices=owner.indices,
    )
