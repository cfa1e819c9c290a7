"""Text form of a graph: `print_graph` and `parse`, exact inverses of each other.

    graph "tiny" {
      rows = 1
      batch = 1
      context = 64
      input %tokens: i32[rows:1]
      param @embed "model.embed_tokens.weight": bf16[vocab:256, hidden:64]
      param @norm "model.layers.{index}.norm.weight": bf16[hidden:64] indices(0..3)

      %h: bf16[rows:1, hidden:64] = embed(%tokens, @embed) loc("tiny.py":7)
      %end: bf16[rows:1, hidden:64] = repeat layers x 4 carry(%in: bf16[rows:1, hidden:64] = %h) {
        %out: bf16[rows:1, hidden:64] = rms_norm(%in, @norm) {eps = 1e-06, weight = plain}
        yield %out
      } loc("tiny.py":8)
      output hidden = %end
    }

An axis is `name:parts`, its parts joined by `+`. A part is a size, or `count`, `x` and the size of
a unit, or the same with `h` for heads, which a mesh may copy: `16h128+48h128`. A checkpoint name is
written when it differs from the key. All attributes of an op are written, so a changed default
never changes what a text means. `docs/graph-ir.md` describes the form.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import fields
from dataclasses import is_dataclass
from enum import Enum
from json import dumps
from re import fullmatch

from mkc.errors import UnsupportedOpError
from mkc.ir.facets import MNEMONICS
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import Value
from mkc.ir.ops import Op
from mkc.ir.text_parse import parse
from mkc.ir.text_tokens import IDENTIFIER
from mkc.ir.text_tokens import SIGIL_NAME
from mkc.ir.types import Axis
from mkc.ir.types import Part
from mkc.ir.types import TensorType

__all__ = ["parse", "print_graph", "print_node", "print_type"]

INDENT = "  "
NOT_NAMES = ("inf", "null")  # words of attributes; as a name they are quoted


def print_graph(graph: Graph) -> str:
    """The text form, ending in a newline.

    Raises:
      UnsupportedOpError: an op is not registered, so its text could not be parsed.
    """
    lines = [f"graph {_string(graph.name)} {{", *_indented(_header(graph))]
    body = [*_block(graph, graph.body)]
    body += [f"output {_name(name)} = {_value(of)}" for name, of in graph.outputs.items()]
    if body:
        lines += ["", *_indented(body)]
    return "\n".join([*lines, "}", ""])


def print_node(graph: Graph, node: Node) -> str:
    """The text form of one node, on one line."""
    results = ", ".join(_typed(value) for value in node.results)
    operands = ", ".join(_operand(graph, name) for name in node.operands)
    text = f"{results} = " if results else ""
    text += f"{_mnemonic(node)}({operands})"
    if node.states:
        text += f" states({', '.join(_key(key) for key in node.states)})"
    attributes = _attributes(node.op)
    if attributes:
        text += f" {attributes}"
    return text + _location(node.location)


def print_type(type_: TensorType) -> str:
    """A type with its axes: `bf16[rows:1, 16h128+48h128]`."""
    return f"{type_.dtype}[{', '.join(_axis(one) for one in type_.axes)}]"


def _header(graph: Graph) -> Iterator[str]:
    yield f"rows = {graph.rows}"
    yield f"batch = {graph.batch}"
    yield f"context = {graph.context}"
    for key, text in graph.metadata.items():
        yield f"metadata {_string(key)} = {_string(text)}"
    for value in graph.inputs:
        yield f"input {_typed(value)}"
    for param in graph.params.values():
        yield f"param {_memory(param)}"
    for state in graph.states.values():
        yield f"state {state.kind} {_memory(state)}"


def _memory(one: Param | State) -> str:
    indices = f" indices({', '.join(_progressions(one.indices))})" if one.indices else ""
    pattern = f" {_string(one.pattern)}" if one.pattern != one.key else ""
    return f"{_key(one.key)}{pattern}: {print_type(one.type)}{indices}"


def _block(graph: Graph, block: Block) -> Iterator[str]:
    for item in block.items:
        if isinstance(item, Repeat):
            yield from _repeat(graph, item)
        else:
            yield print_node(graph, item)


def _repeat(graph: Graph, repeat: Repeat) -> Iterator[str]:
    results = ", ".join(_typed(carry.result) for carry in repeat.carries)
    carried = ", ".join(
        f"{_typed(carry.argument)} = {_value(carry.initial)}" for carry in repeat.carries
    )
    yielded = ", ".join(_value(carry.yielded) for carry in repeat.carries)
    start = f"{results} = " if results else ""
    carry = f" carry({carried})" if carried else ""
    yield f"{start}repeat {_name(repeat.name)} x {repeat.count}{carry} {{"
    yield from _indented(_block(graph, repeat.body))
    if yielded:
        yield f"{INDENT}yield {yielded}"
    yield "}" + _location(repeat.location)


def _mnemonic(node: Node) -> str:
    mnemonic = node.op.mnemonic
    if MNEMONICS.get(mnemonic) is not type(node.op):
        raise UnsupportedOpError(
            op=type(node.op).__name__, facet="mnemonic", location=node.location
        )
    return mnemonic


def _attributes(record: object) -> str:
    """`{name = value, ...}` of a dataclass, in the order of its fields."""
    assert is_dataclass(record), record
    written = [f"{one.name} = {_attribute(getattr(record, one.name))}" for one in fields(record)]
    if isinstance(record, Op) and not written:
        return ""
    return f"{{{', '.join(written)}}}"


def _attribute(value: object) -> str:
    # Enumerations come first: a `StrEnum` is a string too; so do booleans, which are integers.
    if isinstance(value, Enum):
        return _name(str(value.value))
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, tuple):
        return f"({', '.join(_attribute(one) for one in value)})"
    assert is_dataclass(value), f"attribute {value!r} has no text form"
    return _attributes(value)


def _operand(graph: Graph, name: str) -> str:
    return _key(name) if name in graph.params else _value(name)


def _typed(value: Value) -> str:
    return f"{_value(value.name)}: {print_type(value.type)}"


def _axis(one: Axis) -> str:
    parts = "+".join(_part(part) for part in one.parts) or "()"
    return f"{_name(one.name)}:{parts}" if one.name else parts


def _part(part: Part) -> str:
    if part.copyable:
        return f"{part.count}h{part.unit}"
    return f"{part.count}x{part.unit}" if part.unit != 1 else str(part.count)


def _location(location: Location | None) -> str:
    return f" loc({_string(location.file)}:{location.line})" if location is not None else ""


def _progressions(numbers: Sequence[int]) -> Iterator[str]:
    """`0..9` or `3..63 by 4` for three or more numbers at one positive distance, else numbers."""
    start = 0
    while start < len(numbers):
        stop = start + 1
        if stop < len(numbers):
            step = numbers[stop] - numbers[start]
            while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
                stop += 1
            if step > 0 and stop - start >= 3:
                by = f" by {step}" if step > 1 else ""
                yield f"{numbers[start]}..{numbers[stop - 1]}{by}"
                start = stop
                continue
        yield str(numbers[start])
        start += 1


def _value(name: str) -> str:
    return f"%{name}" if fullmatch(SIGIL_NAME, name) else f"%{_string(name)}"


def _key(name: str) -> str:
    return f"@{name}" if fullmatch(SIGIL_NAME, name) else f"@{_string(name)}"


def _name(name: str) -> str:
    return name if fullmatch(IDENTIFIER, name) and name not in NOT_NAMES else _string(name)


def _string(text: str) -> str:
    return dumps(text)


def _indented(lines: Iterator[str] | Sequence[str]) -> list[str]:
    return [f"{INDENT}{line}" for line in lines]
