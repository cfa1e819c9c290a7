"""The same graph for another number of token rows.

Nothing but the types of values depends on the rows: ops, names, parameters and states stay, so
that what was planned for one graph (where each weight lies, how a state is laid out) holds for the
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.infer import infer
from mkc.ir.types import TensorType
from mkc.ir.types import axis


def with_rows_per_sequence(
    graph: Graph, rows_per_sequence: int, *, batch: int | None = None
) -> Graph:
    """`graph` as `mkc.trace(..., rows_per_sequence=...)` would have built it.

    Args:
      batch: sequences, None for as many as before.
    """
    assert rows_per_sequence >= 1, f"{rows_per_sequence} rows per sequence"
    batch = graph.batch if batch is None else batch
    rows = batch * rows_per_sequence
    inputs = tuple(
        replace(
            one,
            type=replace(one.type, axes=(axis(rows, one.type.axes[0].name), *one.type.axes[1:])),
        )
        for one in graph.inputs
    )
    memory = {key: one.type for table in (graph.params, graph.states) for key, one in table.items()}
    types = {value.name: value.type for value in inputs}
    body = _block(graph.body, types, memory)
    return replace(graph, rows=rows, batch=batch, inputs=inputs, body=body)


def _block(block: Block, types: dict[str, TensorType], memory: Mapping[str, TensorType]) -> Block:
    """The block with new types; `types` gets those of its values."""
    items: list[Node | Repeat] = []
    for item in block.items:
        if isinstance(item, Repeat):
            items.append(_repeat(item, types, memory))
            continue
        operands = tuple(types.get(name) or memory[name] for name in item.operands)
        states = tuple(memory[key] for key in item.states)
        results = tuple(
            Value(name=value.name, type=type_)
            for value, type_ in zip(
                item.results, infer(item.op, operands, states, item.location), strict=True
            )
        )
        types.update({value.name: value.type for value in results})
        items.append(replace(item, results=results))
    return Block(items=tuple(items))


def _repeat(
    region: Repeat, types: dict[str, TensorType], memory: Mapping[str, TensorType]
) -> Repeat:
    for carry in region.carries:
        types[carry.argument.name] = types[carry.initial]
    body = _block(region.body, types, memory)
    carries: list[Carry] = []
    for carry in region.carries:
        types[carry.result.name] = types[carry.yielded]
        argument = Value(name=carry.argument.name, type=types[carry.argument.name])
        result = Value(name=carry.result.name, type=types[carry.result.name])
        carries.append(replace(carry, argument=argument, result=result))
    return replace(region, carries=tuple(carries), body=body)
