"""Finds the repetition in a traced loop over layers and folds it into repeat regions.

Two layers are alike when they record the same ops, attributes, types, parameter and state patterns
and the same flow of values. A run of alike groups of layers becomes one repeat region whose body is
folded again, so LLLF x 16 becomes `repeat 16 { repeat 3 { L } F }`. Whatever does not repeat stays
as it was traced. A value may flow from outside a region into all its iterations, within one
iteration, or from one iteration to the next, which makes it a carry; anything else ends the run.
Layers that share a parameter stay apart too, because a region stacks one instance per execution.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from dataclasses import replace

from mkc.ir.graph import Location
from mkc.ir.trace import Segment
from mkc.ir.trace import TracedCarry
from mkc.ir.trace import TracedLoop
from mkc.ir.trace import TracedNode
from mkc.ir.trace import TracedParam
from mkc.ir.trace import TracedRepeat
from mkc.ir.trace import TracedState
from mkc.ir.types import TensorType

type Item = TracedNode | TracedRepeat

# Longest group of layers that is looked for. Bounds the search on stacks without any pattern;
# published hybrid models repeat after 2 to 12 layers.
MAX_PERIOD = 64


@dataclass(kw_only=True)
class Folding:
    """Items of a folded loop, and which value stands for the last iteration's values."""

    items: list[Item]
    renamed: dict[int, int]


def fold_loop(
    loop: TracedLoop, *, read_later: AbstractSet[int], types: list[TensorType]
) -> Folding:
    """Folds one loop.

    Args:
      loop: as traced.
      read_later: values that anything after the loop reads.
      types: type of every value by its number; new values are appended.
    """
    renamed: dict[int, int] = {}
    segments = [segment for segment in loop.segments if segment]
    folder = _Folder(
        segments=segments,
        read_later=read_later,
        types=types,
        renamed=renamed,
        name=loop.name,
    )
    return Folding(items=folder.fold(0, len(segments)), renamed=renamed)


@dataclass(frozen=True, kw_only=True, order=True)
class _Choice:
    """A run of equal groups. Ordered by what is better: more segments saved, then a shorter period,
    then a body that folds further, then an earlier start (the last three are stored negated)."""

    saved: int
    minus_period: int
    minus_changes: int
    minus_start: int
    count: int

    @property
    def start(self) -> int:
        return -self.minus_start

    @property
    def period(self) -> int:
        return -self.minus_period

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


class _Folder:
    """Folds one sequence of segments; the bodies of its regions get folders of their own."""

    def __init__(
        self,
        *,
        segments: Sequence[Segment],
        read_later: AbstractSet[int],
        types: list[TensorType],
        renamed: dict[int, int],
        name: str,
    ) -> None:
        self.segments = segments
        self.read_later = read_later
        self.types = types
        self.renamed = renamed
        self.name = name
        # Value -> (segment, position among the segment's results).
        self.defined: dict[int, tuple[int, int]] = {}
        for number, segment in enumerate(segments):
            results = (value for node in segment for value in node.results)
            for position, value in enumerate(results):
                self.defined[value] = (number, position)
        # Values of other segments that a segment reads, in operand order.
        self.imports = [self._imports_of(number) for number in range(len(segments))]
        self.last_read: dict[int, int] = {}
        for number, imports in enumerate(self.imports):
            for value in imports:
                self.last_read[value] = number
        # The last segment that reads anything of a segment; past the end for values read later.
        self.reach = list(range(len(segments)))
        for value, (number, _) in self.defined.items():
            if value in read_later:
                self.last_read[value] = len(segments)
            self.reach[number] = max(self.reach[number], self.last_read.get(value, 0))
        self.owned = [_owned(segment) for segment in segments]
        self.classes = self._classify()

    def _imports_of(self, number: int) -> list[int]:
        inside = {value for node in self.segments[number] for value in node.results}
        return [v for node in self.segments[number] for v in node.reads() if v not in inside]

    def _classify(self) -> list[int]:
        """A number per segment, equal for segments that are alike apart from what they import."""
        numbers: dict[object, int] = {}
        intern: dict[object, int] = {}

        def short(value: object) -> int:
            # One hash of a large dataclass instead of one per comparison.
            return intern.setdefault(value, len(intern))

        classes = []
        for segment in self.segments:
            local: dict[int, int] = {}
            form: list[object] = []
            for node in segment:
                form.append(short(node.op))
                for operand in node.operands:
                    if isinstance(operand, TracedParam):
                        layered = bool(operand.indices)
                        form.append(("param", operand.pattern, short(operand.type), layered))
                    else:
                        imported = ("import", short(self.types[operand]))
                        form.append(local.get(operand, imported))
                for state in node.states:
                    form.append((state.pattern, state.kind, short(state.type)))
                for value in node.results:
                    local[value] = len(local)
                form.append(tuple(short(type_) for type_ in node.types))
            classes.append(numbers.setdefault(tuple(form), len(numbers)))
        return classes

    def fold(self, low: int, high: int) -> list[Item]:
        """Items of segments low .. high."""
        choice = self._best_choice(low, high)
        if choice is None:
            return [node for segment in self.segments[low:high] for node in segment]
        return [
            *self.fold(low, choice.start),
            self._make_repeat(choice),
            *self.fold(choice.end, high),
        ]

    def _best_choice(self, low: int, high: int) -> _Choice | None:
        best: _Choice | None = None
        for period in range(1, min((high - low) // 2, MAX_PERIOD) + 1):
            if best is not None and (high - low) - period < best.saved:
                break  # even a run over everything saves less
            for start in self._candidate_starts(low, high, period):
                count = self._count_groups(start, period, high)
                if count < 2:
                    continue
                body = self.classes[start : start + period]
                choice = _Choice(
                    saved=period * (count - 1),
                    minus_period=-period,
                    minus_changes=-sum(a != b for a, b in zip(body, body[1:], strict=False)),
                    minus_start=-start,
                    count=count,
                )
                best = choice if best is None else max(best, choice)
        return best

    def _candidate_starts(self, low: int, high: int, period: int) -> Iterator[int]:
        """Starts of runs with this period that are worth a check of their values."""
        start = low
        while start + 2 * period <= high:
            count = self._count_groups(start, period, high)
            if count < 2:
                start += 1
                continue
            # Later starts, up to one period, may make a longer run or a body that folds further.
            yield from range(start, min(start + period, high - 2 * period + 1))
            start += period * (count - 1) + 1

    def _count_groups(self, start: int, period: int, high: int) -> int:
        """The largest number of equal groups from `start` that may become one region."""
        carried: set[tuple[int, int]] = set()
        owned = set[object]().union(*self.owned[start : start + period])
        count = 1
        while start + (count + 1) * period <= high:
            begin = start + count * period
            if self.classes[begin : begin + period] != self.classes[start : start + period]:
                break
            if any(self.reach[n] >= begin + period for n in range(begin - period, begin)):
                break
            more = set[object]().union(*self.owned[begin : begin + period])
            if not owned.isdisjoint(more):
                break  # a tensor that two groups share cannot be stacked
            owned |= more
            found = self._carries_between(start, period, count)
            if found is None:
                break
            if count == 1:
                carried = {source for _, source in found.values()}
            count += 1
        if count > 1 and not self._last_group_is_carried(start, period, count, carried):
            count -= 1
        return count

    def _carries_between(
        self, start: int, period: int, group: int
    ) -> dict[tuple[int, int], tuple[int, tuple[int, int]]] | None:
        """Compares a group with the one before it.

        Returns:
          For every carried import of the group, by (segment of the group, position among its
          imports): the value that the earlier group reads there, and the place of the carried value
          (segment of the group, position). None when the values flow differently.
        """
        begin = start + group * period
        carries: dict[tuple[int, int], tuple[int, tuple[int, int]]] = {}
        for offset in range(period):
            now = self.imports[begin + offset]
            before = self.imports[begin + offset - period]
            for position, (old, new) in enumerate(zip(before, now, strict=True)):
                number, place = self.defined.get(new, (-1, -1))
                if number < start:  # from outside: the same for all groups
                    if old != new:
                        return None
                    continue
                old_place = self.defined.get(old, (-1, -1))
                if number >= begin:  # from the group itself
                    if old_place != (number - period, place):
                        return None
                    continue
                assert number >= begin - period, "the reach of two groups ago ends before"
                enters = group == 1 and old_place[0] < start
                if not enters and old_place != (number - period, place):
                    return None
                carries[offset, position] = (old, (number - begin + period, place))
        return carries

    def _last_group_is_carried(
        self, start: int, period: int, count: int, carried: AbstractSet[tuple[int, int]]
    ) -> bool:
        """Whether everything that is read after the run is a carry, which has a result outside."""
        end = start + count * period
        for offset in range(period):
            number = end - period + offset
            if self.reach[number] < end:
                continue
            results = (value for node in self.segments[number] for value in node.results)
            for position, value in enumerate(results):
                if self.last_read.get(value, 0) >= end and (offset, position) not in carried:
                    return False
        return True

    def _make_repeat(self, choice: _Choice) -> TracedRepeat:
        start, period, count = choice.start, choice.period, choice.count
        found = self._carries_between(start, period, 1)
        assert found is not None, "a chosen run folds"
        carries: dict[tuple[int, tuple[int, int]], TracedCarry] = {}
        arguments: dict[tuple[int, int], int] = {}
        for place, key in found.items():
            if key not in carries:
                initial, (offset, position) = key
                yielded = self._result(start + offset, position)
                type_ = self.types[yielded]
                carries[key] = TracedCarry(
                    initial=initial,
                    argument=self._new_value(type_),
                    yielded=yielded,
                    result=self._new_value(type_),
                    type=type_,
                )
                last = self._result(choice.end - period + offset, position)
                self.renamed.setdefault(last, carries[key].result)
            arguments[place] = carries[key].argument
        body = [
            self._merge(start + offset, period, count, offset, arguments)
            for offset in range(period)
        ]
        inner = _Folder(
            segments=body,
            read_later={carry.yielded for carry in carries.values()},
            types=self.types,
            renamed=self.renamed,
            name=self.name,
        )
        return TracedRepeat(
            name=self.name,
            count=count,
            carries=list(carries.values()),
            body=inner.fold(0, period),
            location=_first_location(body),
        )

    def _new_value(self, type_: TensorType) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def _result(self, number: int, position: int) -> int:
        for node in self.segments[number]:
            if position < len(node.results):
                return node.results[position]
            position -= len(node.results)
        raise AssertionError("a carried value has a place in its segment")

    def _merge(
        self,
        first: int,
        period: int,
        count: int,
        offset: int,
        arguments: dict[tuple[int, int], int],
    ) -> Segment:
        """The segment that stands for segments first, first + period, ...: the first one, with
        stacked parameters and states, and carries as arguments."""
        inside = {value for node in self.segments[first] for value in node.results}
        position = 0
        merged: Segment = []
        for which, node in enumerate(self.segments[first]):
            alike = [self.segments[first + n * period][which] for n in range(count)]
            operands: list[int | TracedParam] = []
            for slot, operand in enumerate(node.operands):
                if isinstance(operand, TracedParam):
                    operands.append(_stack([_param_of(one, slot) for one in alike]))
                elif operand in inside:
                    operands.append(operand)
                else:
                    operands.append(arguments.get((offset, position), operand))
                    position += 1
            states = tuple(
                _stack([one.states[slot] for one in alike]) for slot in range(len(node.states))
            )
            merged.append(replace(node, operands=tuple(operands), states=states))
        return merged


def _stack[Stacked: (TracedParam, TracedState)](instances: Sequence[Stacked]) -> Stacked:
    """One use for all groups. Every instance may itself be stacked by an outer region, whose
    iterations come first in execution order."""
    first = instances[0]
    if not first.indices:
        return first
    steps = zip(*(one.indices for one in instances), strict=True)
    return replace(first, indices=tuple(index for step in steps for index in step))


def _param_of(node: TracedNode, slot: int) -> TracedParam:
    operand = node.operands[slot]
    assert isinstance(operand, TracedParam), "alike nodes have parameters in the same places"
    return operand


def _owned(segment: Segment) -> set[object]:
    """The parameters and states that a segment uses."""
    return {
        ("state" if isinstance(use, TracedState) else "param", use.pattern, use.indices)
        for node in segment
        for use in (*node.operands, *node.states)
        if not isinstance(use, int)
    }


def _first_location(body: Sequence[Segment]) -> Location | None:
    return next((node.location for segment in body for node in segment), None)
