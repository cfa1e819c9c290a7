"""Connects what a drafter reads with the layers of the target that show it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import replace
from re import findall

from mkc.errors import DraftMismatchError
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import Tap


def connect(graph: Graph, *, drafter: str) -> Graph:
    """`graph` whose `read_taps` know their states; taps that nobody reads are gone.

    Args:
      drafter: its name, for messages.

    Raises:
      DraftMismatchError: the target has no such layer, or shows it not.
    """
    places = _places(graph)
    used: dict[str, None] = {}

    def connected(node: Node, op: ReadTaps) -> Node:
        keys: dict[str, int] = {}  # in order of first use, numbered
        numbers, instances = [], []
        for layer in op.layers:
            if (op.name, layer) not in places:
                known = sorted(number for name, number in places if name == op.name)
                shown = f"layers {known[0]} to {known[-1]}" if known else "no layers"
                raise DraftMismatchError(
                    drafter=drafter,
                    problem=f"it looks at layer {layer}, and the target shows {shown} as "
                    f"'{op.name}'",
                )
            key, instance = places[op.name, layer]
            numbers.append(keys.setdefault(key, len(keys)))
            instances.append(instance)
        used.update(dict.fromkeys(keys))
        complete = replace(op, numbers=tuple(numbers), instances=tuple(instances))
        return replace(node, op=complete, states=tuple(keys))

    def second(block: Block) -> Block:
        """Without the taps that nobody reads."""
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                items.append(replace(item, body=second(item.body)))
            elif not isinstance(item.op, Tap) or item.states[0] in used:
                items.append(item)
        return Block(items=tuple(items))

    items = [
        connected(item, item.op)
        if isinstance(item, Node) and isinstance(item.op, ReadTaps)
        else item
        for item in graph.body.items
    ]
    states = {
        key: one
        for key, one in graph.states.items()
        if one.kind is not StateKind.TAP or key in used
    }
    return replace(graph, body=second(Block(items=tuple(items))), states=states)


def _places(graph: Graph) -> Mapping[tuple[str, int], tuple[str, int]]:
    """(name, layer) -> (key of the state, instance)."""
    return {
        (state.pattern.rpartition(".")[2], layer): (key, instance)
        for key, state in graph.states.items()
        if state.kind is StateKind.TAP
        for instance, layer in _layers(state)
    }


def _layers(state: State) -> Iterator[tuple[int, int]]:
    """Instances of a state and their layers; a single one has its layer in its name."""
    if state.indices:
        yield from enumerate(state.indices)
    else:
        yield 0, int(findall(r"(\d+)\.", state.pattern)[-1])
