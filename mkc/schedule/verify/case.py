"""What a launch may be given: the positions of the sequences, and how many rounds run."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.schedule.program import RESTING
from mkc.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of launch.

    Attributes:
      positions: of every sequence, round by round; the last ones stay for the rounds behind.
      rounds: what the launch asks for.
      ran: rounds that run before every sequence rests.
    """

    name: str
    positions: tuple[tuple[int, ...], ...]
    rounds: int = 1
    ran: int = 1

    def at(self, index: int) -> tuple[int, ...]:
        return self.positions[min(index, len(self.positions) - 1)]


def cases_of(program: Program) -> list[Case]:
    """Launches that together show every way the code can go.

    Only two things at run time change the order of events: how many tiles each sequence reads, and
    how many rounds run. Every round begins with the same state (`Walk` compares it), so the kinds
    of positions may come one after the other in the rounds of one launch.
    """
    kinds = _kinds(program)
    nobody = (RESTING,) * program.batch
    if program.rounds_per_launch == 1:
        found = [Case(name=name, positions=(one,)) for name, one in kinds.items()]
        return [*found, Case(name="all rest", positions=(nobody,))]
    most = program.rounds_per_launch
    names = list(kinds)
    found = [
        Case(
            name=f"{most} rounds: {', '.join(names[at : at + most])}",
            positions=tuple(kinds[name] for name in names[at : at + most]),
            rounds=most,
            ran=most,
        )
        for at in range(0, len(names), most)
    ]
    first = (kinds[names[0]],)
    found += [
        Case(name=f"{ran} of {asked} rounds", positions=first, rounds=asked, ran=ran)
        for asked, ran in dict.fromkeys([(1, 1), (most, 1), (most, most - 1)])
    ]
    return [*found, Case(name="all rest", positions=(nobody,), rounds=1, ran=0)]


def _kinds(program: Program) -> dict[str, tuple[int, ...]]:
    """Positions by name.

    Tiles pass through a ring in one order, whatever their number is, so it is enough to have
    sequences of one tile, of more tiles than the ring has slots, of unequal numbers, and some that
    rest beside others that do not.
    """
    batch, last = program.batch, program.context - 1
    tile = max((one.tile for one in program.caches), default=1)
    slots = max((one.slots for one in program.caches), default=1)
    long = min(last, (slots + 2) * tile - 1)
    kinds = {"short": (0,) * batch, "one awake": (RESTING,) * (batch - 1) + (min(last, 2 * tile),)}
    if program.caches:
        kinds |= {
            "long": (long,) * batch,
            "mixed": tuple(0 if sequence % 2 else long for sequence in range(batch)),
            "two tiles": (min(last, tile),) * batch,
        }
    first = {positions: name for name, positions in reversed(kinds.items())}
    return {name: positions for positions, name in reversed(first.items())}
