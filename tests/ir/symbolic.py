"""Runs a graph symbolically: the flat sequence of op executions that its regions stand for."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops import Op
from mkc.ir.types import TensorType


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One op executed once.

    Attributes:
      operands: `tokens`, `positions`, a checkpoint tensor name, or `#n.m`: result m of execution n.
      states: state names with the layer number filled in.
    """

    op: Op
    operands: tuple[str, ...]
    states: tuple[str, ...]
    types: tuple[TensorType, ...]


def executions(graph: Graph) -> tuple[list[Execution], dict[str, str]]:
    """All executions in order, and what each output of the graph is."""
    machine = _Machine(graph)
    machine.block(graph.body, ())
    outputs = {key: machine.values[name] for key, name in graph.outputs.items()}
    return machine.done, outputs


class _Machine:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: list[Execution] = []
        self.values = {value.name: value.name for value in graph.inputs}

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
        number = len(self.done)
        self.done.append(
            Execution(
                op=node.op,
                operands=tuple(self.operand(name, loops) for name in node.operands),
                states=tuple(self.instance(key, loops) for key in node.states),
                types=tuple(result.type for result in node.results),
            )
        )
        for position, result in enumerate(node.results):
            self.values[result.name] = f"#{number}.{position}"

    def operand(self, name: str, loops: tuple[tuple[int, int], ...]) -> str:
        return self.instance(name, loops) if name in self.graph.params else self.values[name]

    def instance(self, key: str, loops: tuple[tuple[int, int], ...]) -> str:
        """The name of the instance that this execution uses."""
        one = self.graph.params.get(key) or self.graph.states[key]
        if not one.indices:
            return one.pattern
        execution, total = 0, 1
        for iteration, count in loops:
            execution = execution * count + iteration
            total *= count
        assert len(one.indices) == total, f"{key} has {len(one.indices)} instances, not {total}"
        return one.pattern.replace("{index}", str(one.indices[execution]))
