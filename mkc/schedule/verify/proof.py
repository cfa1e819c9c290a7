"""The proof: every obligation, on the program of every rank."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.arrays import receive_arrays
from mkc.schedule.verify.arrays import semaphores_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.edit import Edit
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.issue import CODES
from mkc.schedule.verify.issue import OBLIGATIONS
from mkc.schedule.verify.issue import Issue
from mkc.schedule.verify.protocol import Kernel
from mkc.schedule.verify.ranks import Ranks
from mkc.schedule.verify.repeats import Repeats
from mkc.schedule.verify.shapes import check_shapes
from mkc.schedule.verify.structure import check_names
from mkc.schedule.verify.structure import check_structure
from mkc.schedule.verify.walk import Period
from mkc.schedule.verify.walk import Walk
from mkc.targets import Target

MOST_ISSUES = 40  # what follows the first faults is mostly their consequence
ACCESSES, EXCHANGES = (Read, Write), (Send, Receive, Signal, Meet)
SILENT = (
    *(ClearBlocksPhase, DeltaRulePhase, EmbedPhase, ExpertsPhase, KeptDeltaRulePhase, MatmulPhase),
    *(NarrowMatmulPhase, RoutePhase, StoreBlockPhase, StreamAdvancePhase, StreamWaitPhase),
    *(TapPhase, VectorPhase),
)  # phases that exchange nothing and compute no scalars
STEADY = 2  # iteration after which the last one follows: the first, a steady one and the last


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proven.

    Attributes:
      issues: what does not hold; empty when everything does.
      cases: kinds of launches that were looked at.
      events: of one rank that were executed, of all cases.
      messages: events of all ranks' exchanges.
      periods: loops that repeat themselves.
      repeated: iterations that do what others have done, of which no period is known.
    """

    issues: tuple[Issue, ...]
    cases: tuple[str, ...]
    events: int
    messages: int
    periods: tuple[Period, ...]
    repeated: int

    @property
    def ok(self) -> bool:
        return not self.issues

    def checks(self) -> dict[str, bool]:
        """Obligation -> whether it holds."""
        failed = {CODES[one.code].obligation for one in self.issues}
        return {name: name not in failed for name in OBLIGATIONS}


def verify_program(program: Program, target: Target) -> list[Issue]:
    """Everything that does not hold of a program that all ranks run; empty when it is sound."""
    return list(prove([program] * program.ranks, target).issues)


def prove(
    programs: Sequence[Program], target: Target, *, edit: Edit | None = None, shorten: bool = True
) -> Proof:
    """Proves the programs of all ranks.

    Args:
      programs: one per rank; a kernel runs the same on all.
      edit: a change of the events, as editing the generated code would make it; it must treat equal
        events of different iterations alike.
      shorten: leave out iterations that repeat others.
    """
    found = _Found(programs=programs)
    different = [
        program for index, program in enumerate(programs) if program not in programs[:index]
    ]
    named = [check_names(program, found.report) for program in different]
    if not all(named):
        return found.proof()
    fitting = [check_shapes(program, found.report) for program in different]
    if not all(fitting):
        return found.proof()
    for program in different:
        check_structure(program, target, found.report)
    for rank, program in enumerate(programs):
        # Ranks that run the same differ only in whom they send to and which share is their own.
        same = rank > 0 and program is programs[0]
        cases = cases_of(program)
        if same:
            cases = cases[:1] if edit is not None else []
        repeats = Repeats()
        for case in cases:
            _walk(program, rank, case, found, edit, shorten, repeats)
        found.repeated += repeats.left_out
    _exchanges(programs, found, edit, shorten=shorten and len(different) == 1)
    return found.proof()


def _walk(
    program: Program,
    rank: int,
    case: Case,
    found: _Found,
    edit: Edit | None,
    shorten: bool,
    repeats: Repeats,
) -> None:
    walk = Walk(
        program=program,
        rank=rank,
        case=case,
        arrays=arrays_of(program),
        semaphores=semaphores_of(program),
        report=found.report,
        edit=edit,
        shorten=shorten,
        repeats=repeats,
    )
    walk.run()
    found.events += walk.events
    if rank == 0:
        found.cases.append(case.name)
        found.periods += [one for one in walk.periods if one not in found.periods]


def _exchanges(
    programs: Sequence[Program], found: _Found, edit: Edit | None, *, shorten: bool
) -> None:
    """All ranks together.

    What is exchanged does not depend on the iteration, and a place in a receive buffer is used
    again at the latest one border later, if the loop uses it at all. So when all ranks run the same
    program, the first iteration of a loop, a steady one and the last one show everything.
    """
    kernel = Kernel if edit is not None else _Talker
    if len(programs) == 1:
        return
    events = []
    for rank, program in enumerate(programs):
        talk = _Talk(rank=rank, edit=edit, receive=receive_arrays(program), shorten=shorten)
        kernel(program=program, rank=rank, case=cases_of(program)[0], sink=talk).run()
        events.append(talk.events)
    found.messages = sum(map(len, events))
    Ranks(events, [arrays_of(program) for program in programs], found.report).run()


class _Talker(Kernel):
    """A kernel that leaves out what no other rank has to do with."""

    def phase(self, phase: Phase) -> None:
        if not isinstance(phase, SILENT):
            super().phase(phase)


@dataclass(kw_only=True)
class _Talk:
    """Keeps the events that other ranks have to do with."""

    rank: int
    edit: Edit | None
    receive: frozenset[str]
    shorten: bool
    events: list[Event] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def event(self, event: Event) -> None:
        changed: Iterable[Event] = self.edit(self.rank, event) if self.edit else (event,)
        self.events += [one for one in changed if self.concerns(one)]

    def concerns(self, event: Event) -> bool:
        if isinstance(event, ACCESSES):
            return event.place.array in self.receive
        return isinstance(event, EXCHANGES)

    def enter(self, loop: str, count: int) -> None:
        self.counts.append(count)

    def border(self, index: int) -> int:
        count = self.counts[-1]
        return count - 1 - index if self.shorten and index == STEADY and count - 1 > index else 0

    def leave(self) -> None:
        self.counts.pop()

    def problem(self, code: str, phase: str, message: str) -> None:
        """Told by the walk of one rank."""


@dataclass(kw_only=True)
class _Found:
    """Collects issues: one for each code and phase."""

    programs: Sequence[Program]
    issues: dict[tuple[str, str], Issue] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    events: int = 0
    messages: int = 0
    periods: list[Period] = field(default_factory=list)
    repeated: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.phases = {one.id: one for program in self.programs for one in program.phases()}

    @property
    def report(self) -> Callable[[str, str, str], None]:
        def add(code: str, phase: str, message: str) -> None:
            if (code, phase) not in self.issues and len(self.issues) < MOST_ISSUES:
                self.issues[code, phase] = Issue(
                    code=code, message=message, where=self.where(phase), hint=CODES[code].hint
                )

        return add

    def where(self, name: str) -> str:
        phase = self.phases.get(name)
        if phase is None:
            return name
        place = f", {phase.location}" if phase.location else ""
        return f"{phase.id} ({phase.title}{place})"

    def proof(self) -> Proof:
        return Proof(
            issues=tuple(self.issues.values()),
            cases=tuple(self.cases),
            events=self.events,
            messages=self.messages,
            periods=tuple(self.periods),
            repeated=self.repeated,
        )
