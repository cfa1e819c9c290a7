"""The events of a real kernel: its traced code, executed without arithmetic.

`pallas_call` traces a kernel to a program of primitives. All that decides its order (cursors, loop
bounds, slots, peers) is made of scalars, so those are computed, while arrays stay unknown. What is
left are the copies, waits, signals and accesses that the kernel makes, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
from functools import partial
from typing import Any

from mkc.schedule.expert_store import CHOSEN
from mkc.schedule.program import RESTING
from mkc.schedule.program import Program
from mkc.schedule.verify.accesses import READ
from mkc.schedule.verify.accesses import WRITE
from mkc.schedule.verify.accesses import Access
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.experts import most_chosen
from mkc.schedule.verify.prepared import OPERATIONS
from mkc.schedule.verify.prepared import UNKNOWN
from mkc.schedule.verify.prepared import Step
from mkc.schedule.verify.prepared import Value
from mkc.schedule.verify.prepared import known_value
from mkc.schedule.verify.prepared import prepared
from mkc.schedule.verify.trace_ranks import PerRank
from mkc.schedule.verify.trace_ranks import applied
from mkc.schedule.verify.trace_ranks import values_of

BARRIER = "barrier"
TRACED = "traced"  # phase and routine of traced events


class TraceError(Exception):
    """The order of a kernel's events depends on something that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A part of a reference: per dimension first and size; indexed dimensions are not `kept`."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    kept: tuple[bool, ...]

    def at(self, indices: Sequence[Any]) -> View:
        """The part of this part that indices and slices choose."""
        ranges, kept = list(self.ranges), list(self.kept)
        dimensions = [number for number, one in enumerate(kept) if one]
        for number, index in zip(dimensions, indices, strict=True):
            first = ranges[number][0]
            if hasattr(index, "size") and hasattr(index, "start"):
                ranges[number] = (first + _whole(index.start), _whole(index.size))
            else:
                ranges[number] = (first + _whole(index), 1)
                kept[number] = False
        return View(name=self.name, ranges=tuple(ranges), kept=tuple(kept))


def _whole(value: Any) -> Any:
    """An integer, or one for each rank."""
    if value is UNKNOWN:
        raise TraceError("a place in memory depends on data")
    return applied(int, value) if isinstance(value, PerRank) else int(value)


NOT_NUMBERS = {type(UNKNOWN), View}


@dataclass(kw_only=True)
class Tracer:
    """Executes the traced kernel of one rank, or of all in one.

    Attributes:
      rank: its number; `PerRank` for all ranks, whose events then hold such numbers, too.
      arrays: of the program, by name.
      scalars: SMEM arguments by name; the kernel changes its own copies.
      assumed: SMEM arrays that the kernel fills with what depends on data, by name: a number for
        each place in them, as the proof has it.
      events: what was done.
      hints: statements `multiple_of` that are not true.
      accesses: all that was touched, scalars included, to the element; None to keep no account.
      known_parts, known_accesses: so that no part and no event is made twice.
    """

    rank: int | PerRank
    arrays: Mapping[str, Array]
    scalars: dict[str, list[int]]
    assumed: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    accesses: list[Access] | None = None
    known_parts: dict[object, View] = field(default_factory=dict)
    known_accesses: dict[object, Sequence[Event]] = field(default_factory=dict)

    def run(self, kernel: Any, names: Sequence[str]) -> list[Event]:
        """Executes the traced kernel, whose references have these names."""
        views = []
        for name, variable in zip(names, kernel.invars, strict=True):
            shape = variable.aval.shape
            if "smem" in str(variable.aval) and name not in self.scalars:
                self.scalars[name] = [0] * (shape[0] if shape else 1)
            views.append(
                View(
                    name=name,
                    ranges=tuple((0, size) for size in shape),
                    kept=(True,) * len(shape),
                )
            )
        self.call(kernel, views)
        return self.events

    def call(self, jaxpr: Any, arguments: Sequence[Value]) -> Sequence[Value]:
        """Executes a body; returns its results.

        Args:
          arguments: the constants of the body first.
        """
        body = prepared(jaxpr)
        values = dict(body.literals)
        values.update(zip(body.arguments, arguments, strict=True))
        for step in body.steps:
            results = self.execute(step, values)
            for key, result in zip(step.outputs, results, strict=True):
                values[key] = result
        return [values[key] for key in body.results]

    def execute(self, step: Step, values: Mapping[Any, Value]) -> Sequence[Value]:
        special = self.special.get(step.name)
        inputs = [values[key] for key in step.inputs]
        if special is not None:
            return special(step.params, inputs)
        if step.body is not None:
            return self.closed(step.body, inputs)
        if step.has_effects:
            raise TraceError(f"what the primitive {step.name} does is not followed")
        operation = OPERATIONS.get(step.name) if step.is_scalar else None
        kinds = set(map(type, inputs))
        if operation is None or not kinds.isdisjoint(NOT_NUMBERS):
            return [UNKNOWN] * len(step.outputs)
        return [applied(operation, *inputs) if PerRank in kinds else operation(*inputs)]

    @cached_property
    def special(self) -> Mapping[str, Callable[[Any, list[Value]], Sequence[Value]]]:
        """What is done for primitives that are more than arithmetic."""
        prefix = "on_"
        names = [one for one in dir(type(self)) if one.startswith(prefix)]
        return {one.removeprefix(prefix): getattr(self, one) for one in names}

    def closed(self, jaxpr: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Executes a body that may bring its constants."""
        constants = [known_value(one) for one in getattr(jaxpr, "consts", ())]
        return self.call(getattr(jaxpr, "jaxpr", jaxpr), [*constants, *inputs])

    # control flow

    def on_scan(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        constants, carry, columns = (len(one) for one in params["ft_in"].unpack())
        assert columns == 0, "a loop over an array"
        fixed, state = inputs[:constants], inputs[constants : constants + carry]
        for _ in range(params["length"]):
            state = list(self.closed(params["jaxpr"], [*fixed, *state]))
        return state

    def on_while(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        conditions, body = params["cond_nconsts"], params["body_nconsts"]
        asked, fixed = inputs[:conditions], inputs[conditions : conditions + body]
        state = inputs[conditions + body :]
        while True:
            (going,) = self.closed(params["cond_jaxpr"], [*asked, *state])
            if going is UNKNOWN:
                self.only_reads("the end of a loop", params["body_jaxpr"], [*fixed, *state])
                return [UNKNOWN] * len(state)
            if not going:
                return state
            state = list(self.closed(params["body_jaxpr"], [*fixed, *state]))

    def on_cond(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        which, *rest = inputs
        if which is UNKNOWN:
            found: Sequence[Value] = ()
            for branch in params["branches"]:
                found = self.only_reads("a branch", branch, rest)
            return [UNKNOWN] * len(found)
        return self.closed(params["branches"][int(which)], rest)

    def only_reads(self, what: str, jaxpr: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Executes a body of which nobody knows how often it runs: it may compute and read, and
        change nothing that decides an order."""
        scalars = {name: list(one) for name, one in self.scalars.items()}
        before = len(self.events)
        kept = [one if isinstance(one, View) else UNKNOWN for one in inputs]
        found = self.closed(jaxpr, kept)
        others = [one for one in self.events[before:] if not isinstance(one, Read)]
        if others or scalars != self.scalars:
            raise TraceError(f"{what} depends on data")
        return found

    # scalars

    def on_axis_index(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        return [self.rank]

    def on_multiple_of(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        (value,) = inputs
        self.hints += [
            f"{number} is no multiple of {one}"
            for number in values_of(value)
            if isinstance(number, int)
            for one in params["values"]
            if number % one
        ]
        return inputs

    def on_convert_element_type(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        (value,) = inputs
        if value is UNKNOWN:
            return inputs
        kind = params["new_dtype"].kind
        return [applied(bool if kind == "b" else int if kind in "iu" else float, value)]

    def on_get_barrier_semaphore(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        return [View(name=BARRIER, ranges=(), kept=())]

    # memory

    def on_get(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        if inputs[0].name in self.scalars and any(one is UNKNOWN for one in inputs[1:]):
            return [UNKNOWN]
        view = self.part(params["tree"], inputs[0], inputs[1:])
        if view.name in self.assumed:
            return [applied(self.assumed[view.name], *(first for first, _ in view.ranges))]
        if view.name in self.scalars:
            return [self.scalars[view.name][view.ranges[0][0] if view.ranges else 0]]
        self.note(READ, view.name, view.ranges)
        self.events += self.accessed(Read, view)
        return [UNKNOWN]

    def on_swap(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        reference, value, *rest = inputs
        view = self.part(params["tree"], reference, rest)
        if view.name in self.scalars:
            index = view.ranges[0][0] if view.ranges else 0
            # what the model chooses is not known: token 0
            known = 0 if value is UNKNOWN else value
            self.scalars[view.name][index] = known
            self.note(WRITE, view.name, (index, str(value)))
            return [known]
        self.note(WRITE, view.name, view.ranges)
        self.events += self.accessed(Write, view)
        return [UNKNOWN]

    def on_dma_start(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        source, target, received, sent, peer = _dma(params, inputs)
        self.order("copy", source, target, received, sent, peer and _peer(peer))
        semaphore = _semaphore(received)
        (origin,), (place,) = self.places(source), self.places(target)
        if peer is None:
            self.events.append(
                Start(
                    phase=TRACED, routine=TRACED, source=origin, target=place, semaphore=semaphore
                )
            )
        else:
            self.events.append(
                Send(
                    phase=TRACED,
                    routine=TRACED,
                    source=origin,
                    target=place,
                    semaphore=_semaphore(sent),
                    received=semaphore,
                    peer=_peer(peer),
                )
            )
        return []

    def on_dma_wait(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        source, target, received, sent, peer = _dma(params, inputs)
        sending = params["is_wait_send"]
        self.order("wait", sending, target, received)
        # A wait for a send takes its bytes from the source, and is given it as the target.
        (place,) = self.places(target)
        kind = Receive if peer is not None and not sending else Wait
        self.events.append(
            kind(
                phase=TRACED,
                routine=TRACED,
                semaphore=_semaphore(received),
                size=place.count * self.arrays[place.array].unit_bytes,
            )
        )
        return []

    def on_semaphore_signal(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        view, _, amount, peer, _ = params["args_tree"].unflatten(inputs)
        assert view.name == BARRIER and amount == 1, f"a signal of {amount} at {view.name}"
        self.order("signal", _peer(peer))
        self.events.append(Signal(phase=TRACED, routine=TRACED, peer=_peer(peer)))
        return []

    def on_semaphore_wait(self, params: Any, inputs: list[Value]) -> Sequence[Value]:
        view, _, amount, _ = params["args_tree"].unflatten(inputs)
        assert view.name == BARRIER, f"a wait at {view.name}"
        self.order("meet", _whole(amount))
        self.events.append(Meet(phase=TRACED, routine=TRACED, count=_whole(amount)))
        return []

    def order(self, kind: str, *parts: object) -> None:
        """Notes what orders the kernel: a copy, a wait, a signal."""
        self.note(kind, "", parts)

    def note(self, kind: str, array: str, part: tuple[object, ...]) -> None:
        if self.accesses is not None:
            self.accesses.append(Access(kind=kind, array=array, part=part))

    def part(self, tree: Any, whole: View, indices: Sequence[Value]) -> View:
        """What an access takes of a reference; mostly the same as many times before."""
        key = (id(tree), whole, *indices)
        if key not in self.known_parts:
            self.known_parts[key] = _transformed(whole, tree.unflatten(indices))
        return self.known_parts[key]

    def accessed(self, kind: type[Read] | type[Write], view: View) -> Sequence[Event]:
        """Events that say so. Few of them are different, and a rank has 100,000s."""
        key = (kind, view.name, view.ranges)
        if key not in self.known_accesses:
            self.known_accesses[key] = tuple(
                kind(phase=TRACED, routine=TRACED, place=place, data=None)
                for place in self.places(view)
            )
        return self.known_accesses[key]

    def places(self, view: View) -> list[Place]:
        """A part of a reference in the units of its array; one place per block."""
        array = self.arrays[view.name]
        indices: list[tuple[int, ...]] = [()]
        for first, size in view.ranges[: len(array.blocks)]:
            indices = [(*index, first + more) for index in indices for more in range(size)]
        first, count = (0, 1) if array.units == 1 else view.ranges[array.axis]
        return [Place(array=view.name, index=index, first=first, count=count) for index in indices]


def _transformed(view: View, transforms: Sequence[Any]) -> View:
    for one in transforms:
        if not hasattr(one, "indices"):
            raise TraceError(f"{view.name} is taken in another shape or type")
        view = view.at(one.indices)
    return view


def _resolve(reference: Any) -> View:
    """A reference with its slices, however deep."""
    if isinstance(reference, View):
        return reference
    return _transformed(_resolve(reference.ref), reference.transforms)


def _dma(params: Any, inputs: list[Value]) -> tuple[View, View, View, View | None, Any]:
    source, target, received, sent, peer = params["tree"].unflatten(inputs)
    return (
        _resolve(source),
        _resolve(target),
        _resolve(received),
        None if sent is None else _resolve(sent),
        peer,
    )


def _semaphore(view: View | None) -> Semaphore:
    assert view is not None, "a copy without a semaphore"
    return view.name, tuple(first for first, _ in view.ranges)


def _peer(peer: Any) -> Any:
    return _whole(next(iter(peer.values())) if isinstance(peer, dict) else peer)


def pallas_kernel(jaxpr: Any) -> Any:
    """The traced kernel inside a traced launch."""
    found = _find(getattr(jaxpr, "jaxpr", jaxpr))
    assert found is not None, "no pallas_call"
    return found


def _find(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            return equation.params["jaxpr"]
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found = _find(inner)
                if found is not None:
                    return found
    return None


def reference_names(spec: Any) -> list[str]:
    """Names of a kernel's references by its `SPEC`: operands, results, scratch."""
    if spec.rows_per_sequence is not None:
        results = ["emitted", "counts", "drafts", "ran", "tokens_out", "positions_out", "kept_out"]
    else:
        results = ["next_token"] if spec.rounds == 1 else ["emitted", "count"]
    if spec.logits:
        results.append("logits")
    results += [one.name for one in spec.operands if one.updated]
    return [*(one.name for one in spec.operands), *results, *(name for name, _, _ in spec.scratch)]


def tracer_of(program: Program, rank: int | PerRank, case: Case) -> Tracer:
    """A tracer with the scalars of a launch; whatever is emitted is token 0."""
    scalars = {"positions": list(case.at(0)), "tokens": [0] * program.batch}
    if program.round is not None:
        scalars = _round_scalars(program, case)
    if program.round is not None or program.rounds_per_launch > 1:
        scalars["rounds"] = [case.rounds] * program.batch
        count = next(one.shape[0] for one in program.operands if one.role == "stop_ids")
        scalars["stop_ids"] = [-1 if case.ran == case.rounds else 0] * count
    awake = any(position >= 0 for position in scalars["positions"])
    chosen = _chosen_experts(program) if awake else {}
    return Tracer(rank=rank, arrays=arrays_of(program), scalars=scalars, assumed=chosen)


def _chosen_experts(program: Program) -> dict[str, Callable[..., int]]:
    """As many experts as a rank reads at most, the first ones, as in the proof."""
    rings = {one.name: one for one in program.expert_rings}
    found: dict[str, Callable[..., int]] = {}
    for plan in program.experts:
        count = most_chosen(plan, rings[plan.ring])
        found[f"{plan.ring}_chosen"] = partial(_of_chosen, count)
    return found


def _of_chosen(count: int, row: int, place: int) -> int:
    return place if row == CHOSEN else count


def _round_scalars(program: Program, case: Case) -> dict[str, list[int]]:
    """Drafts are token 0, which is accepted, and behind the accepted ones token 1, which is not."""
    assert program.round is not None
    size = program.round.rows_per_sequence
    sequences = list(zip(case.at(0), case.rows_at(0), case.counts_at(0), strict=True))
    return {
        "positions": [
            first + row if row < rows else RESTING
            for first, rows, _ in sequences
            for row in range(size)
        ],
        "tokens": [int(row >= count) for _, _, count in sequences for row in range(size)],
        "kept": list(case.kept_at(0)),
        "budgets": [case.rounds * size + 1] * program.batch,
        # What would be drawn is not known; what has to be emitted is.
        "forced": [0 if row < count else -1 for _, _, count in sequences for row in range(size)],
    }
