"""Carried values get memory of their own where one buffer would not do.

A value that goes round a loop lives in one buffer: the initial value, the argument of the body,
what the body yields and the result. That holds only while nobody reads an older value after a
newer one has been written. Where somebody does, a copy keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from mkc.ir import ops
from mkc.ir import ops_spec
from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value

VIEWS = (ops.SplitHeads, ops.MergeHeads, ops.SplitParts, ops.Slice)
# Phases that still read their operands when they have begun to write their result.
GRADUAL = (
    ops.Linear,
    ops.DeltaRule,
    ops.Attention,
    ops.AllReduce,
    ops_spec.KeptDeltaRule,
    ops_spec.BlockAttention,
)


def separate_carries(graph: Graph) -> Graph:
    """The graph with copies before loops and at the end of their bodies where they are needed."""
    uses = _Uses()
    uses.scan(graph.body, depth=0)
    outputs = {uses.roots.get(name, name) for name in graph.outputs.values()}
    separator = _Separator(uses=uses, kept=outputs)
    return replace(graph, body=separator.block(graph.body, depth=0))


@dataclass(kw_only=True)
class _Uses:
    """Where values are defined and read, by program position; views count as what they look at.

    Attributes:
      roots: view -> the value that it is a view of.
      defined: position at which the memory of a value is written first.
      depths: nesting of the block that defines a value.
      reads: positions by root; a loop reads its initial values on entry, what it yields at its end.
      starts: position of the entry of a loop, by identity.
      makers: value -> the node that computes it.
    """

    roots: dict[str, str] = field(default_factory=dict)
    defined: dict[str, int] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    reads: dict[str, list[int]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    makers: dict[str, Node] = field(default_factory=dict)
    position: int = 0

    def scan(self, block: Block, depth: int) -> None:
        for item in block.items:
            if isinstance(item, Repeat):
                self.repeat(item, depth)
                continue
            is_view = isinstance(item.op, VIEWS)
            for name in item.operands:
                self.read(name)
            for value in item.results:
                self.define(value, depth)
                self.makers[value.name] = item
                if is_view:
                    operand = item.operands[0]
                    self.roots[value.name] = self.roots.get(operand, operand)
            self.position += 1

    def repeat(self, repeat: Repeat, depth: int) -> None:
        start = self.position
        self.starts[id(repeat)] = start
        for carry in repeat.carries:
            self.read(carry.initial)
        self.position += 1
        for carry in repeat.carries:
            self.define(carry.argument, depth + 1)
        self.scan(repeat.body, depth + 1)
        for carry in repeat.carries:
            self.read(carry.yielded)
            self.define(carry.result, depth)
            self.defined[carry.result.name] = min(start, self.defined.get(carry.initial, start))
        self.position += 1

    def define(self, value: Value, depth: int) -> None:
        self.defined[value.name] = self.position
        self.depths[value.name] = depth

    def read(self, name: str) -> None:
        self.reads.setdefault(self.roots.get(name, name), []).append(self.position)


@dataclass(kw_only=True)
class _Separator:
    """Rewrites loops.

    Attributes:
      kept: values that are read after the last operation.
    """

    uses: _Uses
    kept: set[str]

    def block(self, block: Block, depth: int) -> Block:
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                items += self.repeat(item, depth)
            else:
                items.append(item)
        return Block(items=tuple(items))

    def repeat(self, repeat: Repeat, depth: int) -> Iterator[Node | Repeat]:
        body = self.block(repeat.body, depth + 1)
        arguments = {carry.argument.name for carry in repeat.carries}
        yielded = [carry.yielded for carry in repeat.carries]
        carries = []
        copies: list[Node] = []
        for carry in repeat.carries:
            if self._initial_is_needed(carry, self.uses.starts[id(repeat)], depth):
                node = _copy(carry.initial, f"{carry.argument.name}.initial", carry, repeat)
                carry = replace(carry, initial=node.results[0].name)
                yield node
            if carry.yielded in arguments:
                is_needed = carry.yielded != carry.argument.name
            else:
                shared = yielded.count(carry.yielded) > 1
                is_needed = shared or self._argument_is_needed(carry, depth + 1)
            if is_needed:
                node = _copy(carry.yielded, f"{carry.argument.name}.next", carry, repeat)
                carry = replace(carry, yielded=node.results[0].name)
                copies.append(node)
            carries.append(carry)
        yield replace(repeat, carries=tuple(carries), body=Block(items=(*body.items, *copies)))

    def _initial_is_needed(self, carry: Carry, start: int, depth: int) -> bool:
        """True when somebody reads the initial value after the loop has begun to change it."""
        name = carry.initial
        uses = self.uses
        reads = uses.reads[uses.roots.get(name, name)]
        return (
            name in uses.roots
            or name in self.kept
            or uses.depths.get(name) != depth
            or self._is_part_of_a_matmul(name)
            or reads.count(start) > 1
            or max(reads) > start
        )

    def _argument_is_needed(self, carry: Carry, depth: int) -> bool:
        """True when the body reads the argument after, or while, it writes the next one."""
        name = carry.yielded
        uses = self.uses
        if name in uses.roots or uses.depths.get(name) != depth:
            return True
        maker = uses.makers.get(name)
        gradual = maker is None or isinstance(maker.op, GRADUAL)
        first_late = uses.defined[name] + (0 if gradual else 1)
        late = any(one >= first_late for one in uses.reads.get(carry.argument.name, ()))
        return late or self._is_part_of_a_matmul(name)

    def _is_part_of_a_matmul(self, name: str) -> bool:
        """True for a projection whose input, or whose weights, have other projections."""
        maker = self.uses.makers.get(name)
        if maker is None or not isinstance(maker.op, ops.Linear):
            return False
        others = [
            one
            for one in self.uses.makers.values()
            if isinstance(one.op, ops.Linear)
            and (one.operands[0] == maker.operands[0] or one.operands[1] == maker.operands[1])
        ]
        return len(others) > 1


def _copy(name: str, copy: str, carry: Carry, repeat: Repeat) -> Node:
    type = carry.argument.type
    return Node(
        op=ops.Cast(dtype=type.dtype),
        operands=(name,),
        results=(Value(name=copy, type=type),),
        location=repeat.location,
    )
