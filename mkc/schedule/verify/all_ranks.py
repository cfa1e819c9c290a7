"""The events of all ranks: as the verifier says them, and as a traced kernel makes them.

Both come from one execution. Of the traced kernel every scalar is known on every rank
(`trace_ranks`). Of the program only the exchanges know which rank they are on, so they alone are
executed for each; whatever else a kernel does is given no rank to compute with. Events in which
ranks do not differ are the same objects, and are compared once.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from dataclasses import field
from itertools import chain
from itertools import compress
from operator import is_
from typing import Any
from typing import cast

from mkc.schedule.program import Program
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.compare import Recorder
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.exchanges import Exchanges
from mkc.schedule.verify.protocol import Kernel
from mkc.schedule.verify.trace import tracer_of
from mkc.schedule.verify.trace_ranks import EventsByRank
from mkc.schedule.verify.trace_ranks import RanksDivergeError
from mkc.schedule.verify.trace_ranks import per_rank

ACCESSES = (Read, Write)


def expected_of_all(program: Program, case: Case) -> list[list[Event]]:
    """What the verifier says every rank does; see `compare.expected_events`."""
    recorders = [Recorder() for _ in range(program.ranks)]
    everybody = _Everybody(recorders=recorders)
    nobody = cast(int, object())  # nothing can be computed from it
    kernel = Kernel(program=program, rank=nobody, case=case, sink=everybody)
    everybody.kernel = kernel
    kernel.exchanges = cast(Exchanges, everybody)
    kernel.run()
    return [one.events for one in recorders]


@dataclass(kw_only=True)
class _Everybody(Recorder):
    """Takes the events in which ranks do not differ, and stands for the exchanges of all ranks."""

    recorders: Sequence[Recorder]
    kernel: Kernel | None = None
    own: list[Exchanges] = field(default_factory=list)

    def event(self, event: Event) -> None:
        for one in self.recorders:
            one.event(event)

    def __getattr__(self, name: str) -> Any:
        """A routine of the exchanges, executed for every rank."""
        assert name in vars(Exchanges), f"exchanges have no {name}"

        def routine(*arguments: Any) -> None:
            kernel = self.kernel
            assert kernel is not None
            self.own = self.own or [Exchanges(kernel=copy(kernel)) for _ in self.recorders]
            for rank, one in enumerate(self.own):
                vars(one.kernel).update(vars(kernel))
                one.kernel.rank, one.kernel.sink = rank, self.recorders[rank]
                one.kernel.exchanges = one
                getattr(one, name)(*arguments)

        return routine


def traced_of_all(
    program: Program, case: Case, kernel: Any, names: Sequence[str]
) -> tuple[Sequence[Sequence[Event]], list[str]]:
    """What a traced kernel does on every rank, and statements about multiples that are not true.

    Raises:
      TraceError: as of `Tracer`.
    """
    ranks = range(program.ranks)
    try:
        together = tracer_of(program, per_rank(ranks), case)
        return EventsByRank(together.run(kernel, names), program.ranks), together.hints
    except (RanksDivergeError, AssertionError, LookupError, TypeError, ValueError):
        # Ranks go different ways, or the kernel does what no tracer follows: then one rank says so.
        alone = [tracer_of(program, rank, case) for rank in ranks]
        events = [one.run(kernel, names) for one in alone]
        return events, [hint for one in alone for hint in one.hints]


def difference_of_all(
    expected: Sequence[Sequence[Event]], found: Sequence[Sequence[Event]]
) -> tuple[int, str] | None:
    """The first rank that differs, and in what; see `compare.difference`."""
    problem = difference(expected[0], found[0])
    if problem is not None:
        return 0, problem
    known = [_stretches(events) for events in (expected[0], found[0])]
    for rank in range(1, len(found)):
        said, done = expected[rank], found[rank]
        own = [_stretches(said), _stretches(done)]
        if {len(one) for one in own} == {len(known[0])}:
            new = [not _same(*four) for four in zip(*own, *known, strict=True)]
            parts = [[*chain.from_iterable(compress(one, new))] for one in own]
            if difference(*parts) is None:
                continue
        problem = difference(said, done)
        if problem is not None:
            return rank, problem
    return None


def _stretches(events: Sequence[Event]) -> list[list[Event]]:
    """Accesses with the event behind them: what `difference` compares at once."""
    found: list[list[Event]] = [[]]
    for one in events:
        found[-1].append(one)
        if not isinstance(one, ACCESSES):
            found.append([])
    return found


def _same(
    said: list[Event], done: list[Event], known_said: list[Event], known_done: list[Event]
) -> bool:
    """Another rank has the very same events on both sides."""
    pairs = ((said, known_said), (done, known_done))
    return all(len(a) == len(b) and all(map(is_, a, b)) for a, b in pairs)
