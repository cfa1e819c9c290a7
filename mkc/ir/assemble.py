"""From a folded trace to a graph: readable unique names, keys of parameters and states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from re import sub

from mkc.errors import ParamNameError
from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import Value
from mkc.ir.ops import Binary
from mkc.ir.ops import Unary
from mkc.ir.trace import TracedNode
from mkc.ir.trace import TracedParam
from mkc.ir.trace import TracedRepeat
from mkc.ir.trace import TracedState

type Item = TracedNode | TracedRepeat
type Use = TracedParam | TracedState


class Names:
    """Gives unique names: `x`, `x_2`, `x_3`."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._last: dict[str, int] = {}

    def new(self, base: str) -> str:
        name, number = base, self._last.get(base, 1)
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._last[base] = number
        self._used.add(name)
        return name


class Assembler:
    """Builds the body, parameters and states of a graph from folded items.

    Args:
      items: the folded trace.
      values: names of the step's inputs by value number.
      renamed: value numbers that now stand for the result of a region.
    """

    def __init__(
        self, items: Sequence[Item], *, values: Mapping[int, str], renamed: Mapping[int, int]
    ) -> None:
        self._values = dict(values)
        self._renamed = renamed
        self._names = Names()
        self._regions = Names()
        uses = list(_uses(items))
        self._keys = _keys([one for one, _ in uses])
        for name in (*values.values(), *self._keys.values()):
            self._names.new(name)  # values and keys share one name space
        check_states(uses)
        self.params: dict[str, Param] = {}
        self.states: dict[str, State] = {}
        for use, _ in uses:
            self._declare(use)
        self.body = self._block(items)

    def value(self, number: int) -> str:
        """Name of a value."""
        return self._values[self._renamed.get(number, number)]

    def _declare(self, use: Use) -> None:
        key = self._keys[use.pattern, use.indices]
        pattern, indices = _outside_form(use)
        if isinstance(use, TracedParam):
            self.params[key] = Param(key=key, pattern=pattern, type=use.type, indices=indices)
        else:
            self.states[key] = State(
                key=key, pattern=pattern, kind=use.kind, type=use.type, indices=indices
            )

    def _block(self, items: Sequence[Item]) -> Block:
        return Block(
            items=tuple(
                self._repeat(item) if isinstance(item, TracedRepeat) else self._node(item)
                for item in items
            )
        )

    def _node(self, node: TracedNode) -> Node:
        base = base_name(node)
        results = []
        for number, type_ in zip(node.results, node.types, strict=True):
            self._values[number] = self._names.new(base)
            results.append(Value(name=self._values[number], type=type_))
        return Node(
            op=node.op,
            operands=tuple(
                self._keys[one.pattern, one.indices]
                if isinstance(one, TracedParam)
                else self.value(one)
                for one in node.operands
            ),
            states=tuple(self._keys[one.pattern, one.indices] for one in node.states),
            results=tuple(results),
            location=node.location,
        )

    def _repeat(self, region: TracedRepeat) -> Repeat:
        initials = [self.value(carry.initial) for carry in region.carries]
        arguments = []
        for carry, initial in zip(region.carries, initials, strict=True):
            self._values[carry.argument] = self._names.new(f"{_carry_base(initial)}_in")
            arguments.append(Value(name=self._values[carry.argument], type=carry.type))
        name = self._regions.new(region.name)
        body = self._block(region.body)
        carries = []
        for carry, initial, argument in zip(region.carries, initials, arguments, strict=True):
            yielded = self.value(carry.yielded)
            self._values[carry.result] = self._names.new(f"{_carry_base(yielded)}_out")
            carries.append(
                Carry(
                    initial=initial,
                    argument=argument,
                    yielded=yielded,
                    result=Value(name=self._values[carry.result], type=carry.type),
                )
            )
        return Repeat(
            name=name,
            count=region.count,
            carries=tuple(carries),
            body=body,
            location=region.location,
        )


def base_name(node: TracedNode) -> str:
    """What a result is called: the parameter it is a projection of, else the op."""
    if isinstance(node.op, Binary | Unary):
        return node.op.function.value
    for operand in node.operands:
        if isinstance(operand, TracedParam):
            words = [word for word in operand.pattern.split(".") if word not in ("weight", "bias")]
            return sub(r"\W", "_", words[-1] if words else node.op.mnemonic)
    return node.op.mnemonic


def _carry_base(name: str) -> str:
    return sub(r"(_in|_out)(_\d+)?$", "", name)


def _uses(items: Sequence[Item]) -> Iterator[tuple[Use, Location | None]]:
    """Parameters and states in order of use, with the place of the use."""
    for item in items:
        if isinstance(item, TracedRepeat):
            yield from _uses(item.body)
            continue
        for operand in item.operands:
            if isinstance(operand, TracedParam):
                yield operand, item.location
        for state in item.states:
            yield state, item.location


def _outside_form(use: Use) -> tuple[str, tuple[int, ...]]:
    """A single instance has its layer number in its name."""
    if len(use.indices) == 1:
        return use.pattern.replace("{index}", str(use.indices[0])), ()
    return use.pattern, use.indices


def _keys(uses: Sequence[Use]) -> dict[tuple[str, tuple[int, ...]], str]:
    """Keys by pattern and indices: the pattern, numbered where several uses share it."""
    groups: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {}
    for use in uses:
        pattern, _ = _outside_form(use)
        groups.setdefault(pattern, {})[use.pattern, use.indices] = None
    keys = {}
    for pattern, group in groups.items():
        for number, identity in enumerate(group):
            keys[identity] = pattern if len(group) == 1 else f"{pattern}#{number}"
    return keys


def check_states(uses: Sequence[tuple[Use, Location | None]]) -> None:
    """A state belongs to one op, which reads and rewrites it once per step.

    Raises:
      ParamNameError: two ops, perhaps of two layers, use one state.
    """
    owned: set[tuple[str, int]] = set()
    for use, location in uses:
        if isinstance(use, TracedParam):
            continue
        for index in use.indices:
            if (use.pattern, index) in owned:
                raise ParamNameError(
                    name=use.pattern.replace("{index}", str(index)),
                    location=location,
                    problem="a second op uses this state",
                    hint="Create a state for each op, from the layer that uses it",
                )
            owned.add((use.pattern, index))
