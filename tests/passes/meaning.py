"""What a graph computes and what a program computes, as comparable symbols.

A value is an array of symbols, one per lane; a symbol stands for lane i of the result of an
operation on operands that are symbols themselves. Equal computations get equal symbols, so a
program is right when every operation it executes is one that the graph executes, and when no
operation is left out.

`run_graph` follows values by name. `run_program` knows no names: it executes the phases, all
iterations of all loops, on VMEM regions that hold symbols. A phase that reads lanes which another
buffer has overwritten meets symbols that the graph does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from mkc.ir import ops
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK
from mkc.ir.types import TensorType
from mkc.passes.rank_ops import AllGather

type Lanes = NDArray[np.int64]
type Operation = tuple[str, tuple[bytes | str, ...]]  # op, operands: lanes or names

LANES_PER_RESULT = 1 << 24
NOTHING = -1  # memory that nothing was written to, or padding


@dataclass(kw_only=True)
class Symbols:
    """Operations and the numbers of their first lanes."""

    numbers: dict[Operation, int] = field(default_factory=dict)

    def apply(self, op: str, operands: tuple[Lanes | str, ...]) -> Operation:
        """The operation as a key; operands that are names are parameters, states or inputs."""
        parts = (one if isinstance(one, str) else one.tobytes() for one in operands)
        return op, tuple(parts)

    def result(self, operation: Operation, width: int, index: int = 0) -> Lanes:
        """Lanes of result `index` of an operation."""
        number = self.numbers.setdefault(operation, len(self.numbers))
        return (number * 4 + index) * LANES_PER_RESULT + np.arange(width, dtype=np.int64)


@dataclass(kw_only=True)
class Meaning:
    """Operations in execution order, with the place that executed each, and the outputs."""

    operations: list[tuple[Operation, str]] = field(default_factory=list)
    outputs: dict[str, Lanes] = field(default_factory=dict)


def width_of(type: TensorType) -> int:
    """Lanes of a value [rows, ...] or of a vector."""
    sizes = type.shape[1:] if type.rank > 1 else type.shape
    return int(np.prod(sizes, dtype=np.int64))


def is_view(node: Node) -> bool:
    """True for operations that only look at lanes in another way."""
    if isinstance(node.op, ops.Slice):
        return node.results[0].type.rank == 2
    return isinstance(node.op, ops.SplitHeads | ops.MergeHeads | ops.SplitParts)


def views(node: Node, lanes: Lanes) -> list[Lanes]:
    """Results of a view."""
    start = node.op.start if isinstance(node.op, ops.Slice) else 0
    found = []
    for value in node.results:
        width = width_of(value.type)
        found.append(lanes[start : start + width])
        start += width
    return found


def run_graph(graph: Graph, symbols: Symbols) -> Meaning:
    """Executes a graph: regions as often as they say."""
    machine = _GraphMachine(graph=graph, symbols=symbols)
    for value in graph.inputs:
        machine.values[value.name] = value.name
    machine.block(graph.body, ())
    for name, value_name in graph.outputs.items():
        lanes = machine.values[value_name]
        assert not isinstance(lanes, str)
        machine.meaning.outputs[name] = lanes
    return machine.meaning


@dataclass(kw_only=True)
class _GraphMachine:
    graph: Graph
    symbols: Symbols
    values: dict[str, Lanes | str] = field(default_factory=dict)
    shown: dict[str, Lanes] = field(default_factory=dict)  # taps by instance
    meaning: Meaning = field(default_factory=Meaning)

    def block(self, block: Block, loops: tuple[tuple[int, int], ...]) -> None:
        """`loops`: (iteration, count) of the regions around, outermost first."""
        for item in block.items:
            if isinstance(item, Repeat):
                self.repeat(item, loops)
            else:
                self.node(item, loops)

    def repeat(self, region: Repeat, loops: tuple[tuple[int, int], ...]) -> None:
        carried = [self.values[carry.initial] for carry in region.carries]
        for iteration in range(region.count):
            for carry, value in zip(region.carries, carried, strict=True):
                self.values[carry.argument.name] = value
            self.block(region.body, (*loops, (iteration, region.count)))
            carried = [self.values[carry.yielded] for carry in region.carries]
        for carry, value in zip(region.carries, carried, strict=True):
            self.values[carry.result.name] = value

    def node(self, node: Node, loops: tuple[tuple[int, int], ...]) -> None:
        operands = tuple(
            self.instance(name, loops) if name in self.graph.params else self.values[name]
            for name in node.operands
        )
        if isinstance(node.op, Tap):
            (lanes,) = operands
            assert not isinstance(lanes, str)
            self.shown[self.instance(node.states[0], loops)] = lanes
            return
        if isinstance(node.op, ReadTaps):
            found = [self.read_taps(node, node.op)]
        elif is_view(node):
            (lanes,) = operands
            assert not isinstance(lanes, str)
            found = views(node, lanes)
        else:
            if isinstance(node.op, SelectorWalk):
                operands = operands[:6]  # a greedy walk does not look at positions
            states = tuple(self.instance(key, loops) for key in node.states)
            operation = self.symbols.apply(described(node.op), (*operands, *states))
            self.meaning.operations.append((operation, f"{node.op.mnemonic} at {node.location}"))
            found = [
                self.symbols.result(operation, width_of(value.type), index)
                for index, value in enumerate(node.results)
            ]
        for value, lanes in zip(node.results, found, strict=True):
            self.values[value.name] = lanes

    def read_taps(self, node: Node, op: ReadTaps) -> Lanes:
        """What some layers have shown, side by side."""
        places = zip(op.numbers, op.instances, strict=True)
        names = [instance_name(self.graph, node.states[one], at) for one, at in places]
        return np.concatenate([self.shown[name] for name in names])

    def instance(self, key: str, loops: tuple[tuple[int, int], ...]) -> str:
        """Name of the parameter or state that this execution uses."""
        one = self.graph.params.get(key) or self.graph.states[key]
        execution = 0
        for iteration, count in loops:
            execution = execution * count + iteration
        return instance_name(self.graph, key, execution if one.indices else 0)


def instance_name(graph: Graph, key: str, execution: int) -> str:
    """Checkpoint name of an instance, or the readable name of a state's."""
    one = graph.params.get(key) or graph.states[key]
    assert execution < one.instances, f"{key} has no instance {execution}"
    index = one.indices[execution] if one.indices else ""
    return one.pattern.replace("{index}", str(index))


def described(op: ops.Op) -> str:
    """An op as text, without what a program does not repeat."""
    plain = ops.Linear | ops.Attention | ops.DeltaRule | ops.AllReduce | ops.Embed | ops.MaskTokens
    of_rounds = KeptDeltaRule | BlockAttention | AllGather | SelectorWalk
    if isinstance(op, plain | of_rounds):
        return op.mnemonic
    for kind in (ops.Argmax, TopK, Accept):
        if isinstance(op, kind) or op.mnemonic == f"sharded_{kind.mnemonic}":
            return kind.mnemonic
    return repr(op)
