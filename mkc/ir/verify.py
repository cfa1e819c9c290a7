"""Verifier of graphs: what must hold after tracing and after every pass.

`findings` returns everything that is wrong; `verify` raises for it. A finding names the op, the
author's line, what was expected and what to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

from mkc.errors import GraphError
from mkc.errors import ShapeError
from mkc.ir.facets import INFER
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.infer import infer
from mkc.ir.register import STATE_KINDS
from mkc.ir.types import DType
from mkc.ir.types import TensorType

INPUT_NAMES = ("tokens", "positions")  # of every step; a round of a scheme has more


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something wrong with a graph.

    Attributes:
      rule: short stable name of the violated rule.
      op: what is wrong: an op with its first result, a region, a parameter, the graph.
      location: the author's line, when known.
      problem, expected, hint: what is, what should be, what to change.
    """

    rule: str
    op: str
    location: Location | None
    problem: str
    expected: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location is not None else ""
        return f"{place}{self.op}: {self.problem}; expected {self.expected}. {self.hint}."


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a finding is about."""

    op: str
    location: Location | None = None

    def finding(self, rule: str, *, problem: str, expected: str, hint: str) -> Finding:
        return Finding(
            rule=rule,
            op=self.op,
            location=self.location,
            problem=problem,
            expected=expected,
            hint=hint,
        )


def verify(graph: Graph) -> None:
    """Raises for the first finding, and says how many more there are.

    Raises:
      GraphError: the graph does not make sense.
    """
    found = findings(graph)
    if not found:
        return
    first = found[0]
    more = f" ({len(found) - 1} more findings follow from it or stand beside it)"
    raise GraphError(
        op=first.op,
        location=first.location,
        problem=first.problem,
        expected=first.expected,
        hint=first.hint + (more if len(found) > 1 else ""),
    )


def findings(graph: Graph) -> list[Finding]:
    """Everything that is wrong with `graph`, in program order."""
    check = _Check(graph=graph)
    return [
        *_sizes(graph),
        *_inputs(graph),
        *_memories(graph),
        *check.block(graph.body, scope=check.entry_scope(), region=()),
        *check.outputs(),
        *check.unused(),
    ]


# The graph as a whole.


def _sizes(graph: Graph) -> Iterator[Finding]:
    owner = Subject(op=f"graph '{graph.name}'")
    for name in ("rows", "batch", "context"):
        size = getattr(graph, name)
        if size < 1:
            yield owner.finding(
                "sizes",
                problem=f"{name} is {size}",
                expected="at least 1",
                hint=f"Build the graph with a larger {name}",
            )
    if graph.batch > 0 and graph.rows % graph.batch:
        yield owner.finding(
            "sizes",
            problem=f"{graph.rows} rows for batch {graph.batch}",
            expected="the same number of rows for every sequence",
            hint=f"Make rows a multiple of {graph.batch}",
        )


def _inputs(graph: Graph) -> Iterator[Finding]:
    for value in graph.inputs:
        owner = Subject(op=f"input %{value.name}")
        if value.name not in INPUT_NAMES:
            if value.type.shape[:1] not in ((graph.rows,), (graph.batch,)):
                yield owner.finding(
                    "inputs",
                    problem=f"it is {value.type}",
                    expected=f"a first axis of {graph.rows} rows or {graph.batch} sequences",
                    hint="Give it one entry per row or per sequence",
                )
        elif _plain(value.type) != (DType.I32, (graph.rows,)):
            yield owner.finding(
                "inputs",
                problem=f"it is {value.type}",
                expected=f"{' or '.join(INPUT_NAMES)} of type i32[{graph.rows}]",
                hint="Give the graph the step's token ids and positions, one per row",
            )


def _memories(graph: Graph) -> Iterator[Finding]:
    """Parameters and states by themselves."""
    for table in (graph.params, graph.states):
        for key, one in table.items():
            yield from _memory(key, one)
    for key in sorted(graph.params.keys() & graph.states.keys()):
        yield _memory_finding(
            f"state @{key}", "a parameter has the same key", "unique keys", "Rename one of them"
        )
    for state in graph.states.values():
        if state.kind is StateKind.KV_CACHE and state.type.shape[:1] != (graph.context,):
            yield _memory_finding(
                f"state @{state.key}",
                f"its type is {state.type}",
                f"a first axis of the graph's context, {graph.context}",
                "Declare the cache with the step's context",
            )


def _memory(key: str, one: Param | State) -> Iterator[Finding]:
    what = f"{'parameter' if isinstance(one, Param) else 'state'} @{key}"
    if one.key != key:
        yield _memory_finding(
            what, f"it calls itself '{one.key}'", "the key it is stored under", "Use one key"
        )
    numbered = "{index}" in one.pattern
    if numbered and not one.indices:
        yield _memory_finding(
            what,
            f"its name '{one.pattern}' has a layer number, but it has no layers",
            "one index per layer",
            "Give it indices, or a name without {index}",
        )
    if isinstance(one, Param) and not numbered and len(one.indices) > 1:
        yield _memory_finding(
            what,
            f"{len(one.indices)} layers read the one tensor '{one.pattern}'",
            "a tensor per layer",
            "Put {index} where the layer number stands",
        )
    if len(set(one.indices)) < len(one.indices) and numbered:
        twice = sorted({index for index in one.indices if one.indices.count(index) > 1})
        yield _memory_finding(
            what,
            f"layers {', '.join(str(index) for index in twice)} occur twice",
            "every layer once",
            "Correct the indices",
        )


def _memory_finding(what: str, problem: str, expected: str, hint: str) -> Finding:
    return Subject(op=what).finding("memory", problem=problem, expected=expected, hint=hint)


# Nodes and regions.


@dataclass(kw_only=True)
class _Check:
    """One walk over a graph.

    Attributes:
      defined: every value seen so far, with the region that defines it.
      users: nodes that use each state.
      used_params: parameters that a node reads.
      scope_at_end: values outside all regions.
      counts: executions of each region, which is the names of the regions from outside to it.
    """

    graph: Graph
    defined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)
    used_params: set[str] = field(default_factory=set)
    scope_at_end: dict[str, TensorType] = field(default_factory=dict)
    counts: dict[tuple[str, ...], int] = field(default_factory=lambda: {(): 1})

    def entry_scope(self) -> dict[str, TensorType]:
        for value in self.graph.inputs:
            self.defined[value.name] = ()
        self.scope_at_end = {value.name: value.type for value in self.graph.inputs}
        return self.scope_at_end

    def block(
        self, block: Block, *, scope: dict[str, TensorType], region: tuple[str, ...]
    ) -> Iterator[Finding]:
        """Checks items in order and adds what they define to `scope`."""
        for item in block.items:
            if isinstance(item, Repeat):
                yield from self.repeat(item, scope, region)
            else:
                yield from self.node(item, scope, region)

    def define(
        self,
        value: Value,
        scope: dict[str, TensorType],
        region: tuple[str, ...],
        owner: Subject,
    ) -> Iterator[Finding]:
        taken = value.name in self.defined
        if taken or value.name in self.graph.params or value.name in self.graph.states:
            yield owner.finding(
                "unique names",
                problem=f"the name %{value.name} is already taken",
                expected="a name of its own for every value, parameter and state",
                hint="Rename the result",
            )
        self.defined[value.name] = region
        scope[value.name] = value.type

    def lookup(
        self, name: str, scope: dict[str, TensorType], owner: Subject
    ) -> TensorType | Finding:
        """The type of a value in scope, or why there is none."""
        if name in scope:
            return scope[name]
        hint = "Move the use behind the definition, or correct the name"
        problem = f"operand %{name} is not defined before its use"
        expected = "a value defined earlier"
        if name in self.defined:
            problem = f"operand %{name} is a value inside region '{self.defined[name][-1]}'"
            expected = "a value of this region or of one around it"
            hint = "Carry the value out of the region"
        return owner.finding("scope", problem=problem, expected=expected, hint=hint)

    # A node.

    def node(
        self, node: Node, scope: dict[str, TensorType], region: tuple[str, ...]
    ) -> Iterator[Finding]:
        owner = Subject(op=describe(node), location=node.location)
        operands: list[TensorType] = []
        for name in node.operands:
            if name in self.graph.params:
                param = self.graph.params[name]
                self.used_params.add(name)
                yield from self.instances(param, region, owner)
                operands.append(param.type)
                continue
            found = self.lookup(name, scope, owner)
            if isinstance(found, Finding):
                yield found
            else:
                operands.append(found)
        states: list[State] = []
        for key in node.states:
            if key not in self.graph.states:
                yield self.unknown_state(key, owner)
                continue
            states.append(self.graph.states[key])
            if not node.op.whole_states:
                yield from self.instances(states[-1], region, owner)
                yield from self.second_use(key, owner)
        # Types mean nothing while an operand or state is missing.
        if len(operands) == len(node.operands) and len(states) == len(node.states):
            kinds = list(_state_kinds(node, states, owner))
            yield from kinds
            if not kinds:
                yield from self.types(node, operands, [state.type for state in states], owner)
        for value in node.results:
            yield from self.define(value, scope, region, owner)

    def unknown_state(self, key: str, owner: Subject) -> Finding:
        return owner.finding(
            "states",
            problem=f"state @{key} is not in the graph",
            expected="a declared state",
            hint="Declare the state, or correct its key",
        )

    def second_use(self, key: str, owner: Subject) -> Iterator[Finding]:
        self.users[key] = self.users.get(key, 0) + 1
        if self.users[key] > 1:
            yield owner.finding(
                "states",
                problem=f"state @{key} is used by another op too",
                expected="one op per state, which reads and writes it once per step",
                hint="Declare a second state",
            )

    def instances(
        self, one: Param | State, region: tuple[str, ...], owner: Subject
    ) -> Iterator[Finding]:
        runs = self.counts[region]
        if one.instances == runs:
            return
        what = "parameter" if isinstance(one, Param) else "state"
        around = f"inside region '{'/'.join(region)}'" if region else "outside repeat regions"
        yield owner.finding(
            "instances",
            problem=f"{what} @{one.key} has {one.instances} instances, the op runs {runs} times "
            f"{around}",
            expected=f"{runs} instances, one per execution",
            hint=f"Make the {what} from the layer (layer.param, layer.state), one for each layer",
        )

    def types(
        self,
        node: Node,
        operands: list[TensorType],
        states: list[TensorType],
        owner: Subject,
    ) -> Iterator[Finding]:
        if INFER.find(node.op) is None:
            yield owner.finding(
                "types",
                problem="the op is not registered",
                expected="an op with shape inference",
                hint="Register it with mkc.ir.register.register_op",
            )
            return
        try:
            expected = infer(node.op, tuple(operands), tuple(states))
        except ShapeError as error:
            yield owner.finding(
                "types", problem=f"it has {error.got}", expected=error.expected, hint=error.hint
            )
            return
        got = tuple(value.type for value in node.results)
        if not _same_types(got, expected):
            yield owner.finding(
                "types",
                problem=f"its results are {_listed(got)}",
                expected=_listed(expected),
                hint="Give the results the types that follow from the operands",
            )

    # A region.

    def repeat(
        self, repeat: Repeat, scope: dict[str, TensorType], region: tuple[str, ...]
    ) -> Iterator[Finding]:
        owner = Subject(op=f"repeat '{repeat.name}'", location=repeat.location)
        inner_region = (*region, repeat.name)
        if repeat.count < 1:
            yield owner.finding(
                "count",
                problem=f"it runs {repeat.count} times",
                expected="at least one execution",
                hint="Leave the region out, or correct the count",
            )
        if any(repeat.name in other for other in self.counts):
            yield owner.finding(
                "unique names",
                problem=f"a region named '{repeat.name}' exists already",
                expected="a name of its own for every region",
                hint="Rename one of them",
            )
        self.counts[inner_region] = self.counts[region] * repeat.count
        inner = dict(scope)
        for carry in repeat.carries:
            found = self.lookup(carry.initial, scope, owner)
            if isinstance(found, Finding):
                yield found
            elif not _same_types((found,), (carry.argument.type,)):
                yield _carry_finding(owner, carry.initial, found, carry.argument)
            yield from self.define(carry.argument, inner, inner_region, owner)
        yield from self.block(repeat.body, scope=inner, region=inner_region)
        for carry in repeat.carries:
            found = self.lookup(carry.yielded, inner, owner)
            if isinstance(found, Finding):
                yield found
            elif not _same_types((found,), (carry.argument.type,)):
                yield _carry_finding(owner, carry.yielded, found, carry.argument)
            if not _same_types((carry.result.type,), (carry.argument.type,)):
                yield _carry_finding(owner, carry.result.name, carry.result.type, carry.argument)
            yield from self.define(carry.result, scope, region, owner)

    # The end.

    def outputs(self) -> Iterator[Finding]:
        owner = Subject(op=f"graph '{self.graph.name}'")
        if not self.graph.outputs:
            yield owner.finding(
                "outputs",
                problem="it has no outputs",
                expected="at least one",
                hint="Return the model's outputs from its function",
            )
        for name, of in self.graph.outputs.items():
            found = self.lookup(of, self.scope_at_end, Subject(op=f"output '{name}'"))
            if isinstance(found, Finding):
                yield found

    def unused(self) -> Iterator[Finding]:
        for key, param in self.graph.params.items():
            if key not in self.used_params:
                yield _memory_finding(
                    f"parameter @{key}",
                    f"no op reads it ('{param.pattern}')",
                    "a reader for every parameter",
                    "Use the parameter, or do not declare it",
                )
        for key, state in self.graph.states.items():
            if key not in self.users:
                yield _memory_finding(
                    f"state @{key}",
                    f"no op uses it ('{state.pattern}')",
                    "one op per state",
                    "Use the state, or do not declare it",
                )


def describe(node: Node) -> str:
    """How messages call a node: its mnemonic and first result."""
    return f"{node.op.mnemonic} %{node.results[0].name}" if node.results else node.op.mnemonic


def _state_kinds(node: Node, states: list[State], owner: Subject) -> Iterator[Finding]:
    got = tuple(state.kind for state in states)
    expected = STATE_KINDS.get(type(node.op), ())
    if node.op.whole_states:
        expected = (StateKind.TAP,) * len(states)
    if got != expected:
        yield owner.finding(
            "states",
            problem=f"its states are {_listed(got) or 'none'}",
            expected=_listed(expected) or "none",
            hint="Give the op states of these kinds, in this order",
        )


def _carry_finding(owner: Subject, name: str, got: TensorType, argument: Value) -> Finding:
    return owner.finding(
        "carries",
        problem=f"%{name} is {got}, but it goes round the region as %{argument.name}",
        expected=str(argument.type),
        hint="Keep the type from one iteration to the next, for instance with a cast",
    )


def _same_types(got: tuple[TensorType, ...], expected: tuple[TensorType, ...]) -> bool:
    """Equal dtypes and axis layouts; names of axes do not matter."""
    return len(got) == len(expected) and all(
        one.dtype is other.dtype
        and one.rank == other.rank
        and all(a.same_layout(b) for a, b in zip(one.axes, other.axes, strict=True))
        for one, other in zip(got, expected, strict=True)
    )


def _plain(type_: TensorType) -> tuple[DType, tuple[int, ...]]:
    return type_.dtype, type_.shape


def _listed(items: tuple[object, ...]) -> str:
    return ", ".join(str(item) for item in items)
