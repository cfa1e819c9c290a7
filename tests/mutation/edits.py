"""Ways to spoil a program or the events of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.verify.edit import Edit
from mkc.schedule.verify.events import Event

type Test = Callable[[Event], bool]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is proven in place of the sound program: a program per rank, and edited events."""

    programs: tuple[Program, ...]
    edit: Edit | None = None


def everywhere(program: Program, edit: Edit | None = None) -> Mutant:
    """All ranks run the same."""
    return Mutant(programs=(program,) * program.ranks, edit=edit)


def on_one_rank(sound: Program, changed: Program) -> Mutant:
    """The last rank runs something else."""
    return Mutant(programs=(*(sound,) * (sound.ranks - 1), changed))


def replacing(test: Test, change: Callable[[Event], Iterable[Event]]) -> Edit:
    """On every rank, other events in place of those that `test` picks."""

    def edit(rank: int, event: Event) -> Iterable[Event]:
        return change(event) if test(event) else (event,)

    return edit


def dropping(test: Test) -> Edit:
    return replacing(test, lambda event: ())


def is_event(kind: type[Event], routine: str = "", phase: str = "") -> Test:
    """Events of a kind, of a routine and a phase when they are named."""
    return lambda event: (
        isinstance(event, kind)
        and (not routine or event.routine == routine)
        and (not phase or event.phase == phase)
    )


def with_phases(program: Program, change: Callable[[Phase], Phase | None]) -> Program:
    """Every phase changed; None drops it."""

    def visit(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        found: list[Phase | Loop] = []
        for item in body:
            if isinstance(item, Loop):
                found.append(replace(item, body=visit(item.body)))
            elif (changed := change(item)) is not None:
                found.append(changed)
        return tuple(found)

    return replace(program, body=visit(program.body))


def with_bodies(
    program: Program, change: Callable[[tuple[Phase | Loop, ...]], tuple[Phase | Loop, ...]]
) -> Program:
    """Every body changed as a whole, inner ones first."""

    def visit(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        inner = [
            replace(one, body=visit(one.body)) if isinstance(one, Loop) else one for one in body
        ]
        return change(tuple(inner))

    return replace(program, body=visit(program.body))


def with_one(
    table: tuple[Any, ...], test: Callable[[Any], bool], **changes: Any
) -> tuple[Any, ...]:
    """The first entry that passes `test`, changed."""
    at = next(number for number, one in enumerate(table) if test(one))
    return (*table[:at], replace(table[at], **changes), *table[at + 1 :])


def matmuls(program: Program) -> list[MatmulPhase]:
    return [one for one in program.phases() if isinstance(one, MatmulPhase)]


def with_loop(program: Program, more: int) -> Program:
    """The program whose first loop runs `more` times more."""
    at = next(number for number, one in enumerate(program.body) if isinstance(one, Loop))
    loop = program.body[at]
    assert isinstance(loop, Loop)
    longer = replace(loop, count=loop.count + more)
    return replace(program, body=(*program.body[:at], longer, *program.body[at + 1 :]))
