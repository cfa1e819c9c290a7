"""What a launch may be given: the positions of the sequences, and how many rounds run."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from itertools import cycle
from itertools import islice

from mkc.schedule.program import RESTING
from mkc.schedule.program import Program
from mkc.schedule.verify.arrays import BLOCK_ROWS

FOLLOWING = 3  # rounds of one launch: the first, one behind it, and the last
UNDECIDED = "not decided"  # the first sequence emits nothing, and has to be told what

type Numbers = tuple[int, ...]
"""One for each sequence."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of launch.

    Attributes:
      positions: of every sequence, round by round; the last ones stay for the rounds behind. In a
        round of a scheme those of the first row.
      rows: of a scheme: how many rows of every sequence are no padding, round by round.
      counts: of a scheme: how many of them are accepted.
      rounds: what the launch asks for.
      ran: rounds that run before every sequence rests.
    """

    name: str
    positions: tuple[Numbers, ...]
    rows: tuple[Numbers, ...] = ()
    counts: tuple[Numbers, ...] = ()
    rounds: int = 1
    ran: int = 1

    def at(self, index: int) -> Numbers:
        return self.positions[min(index, len(self.positions) - 1)]

    def rows_at(self, index: int) -> Numbers:
        return self.rows[min(index, len(self.rows) - 1)]

    def counts_at(self, index: int) -> Numbers:
        return self.counts[min(index, len(self.counts) - 1)]

    def kept_at(self, index: int) -> Numbers:
        """What the round before has accepted; before the first one any number."""
        if index == 0:
            return tuple(sequence + 1 for sequence in range(len(self.at(0))))
        return self.counts_at(index - 1)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What one round may meet, sequence by sequence; see `Case`."""

    positions: Numbers
    rows: Numbers = ()
    counts: Numbers = ()


def cases_of(program: Program) -> list[Case]:
    """Launches that together show every way the code can go.

    Only these change the order of events at run time: how many tiles each sequence reads, how many
    rows enter its caches, and how many rounds run. Every round begins with the same state (`Walk`
    compares it), so the kinds may come one after the other in the rounds of one launch.
    """
    most = program.rounds_per_launch
    if most == 1:
        return _launches_of_one_round(program)
    kinds, nobody = _kinds_of(program), _nobody(program)
    names = [name for name in kinds if name != UNDECIDED]
    found = [
        _case(
            f"{most} rounds: {', '.join(names[at : at + most])}",
            [kinds[name] for name in names[at : at + most]],
            rounds=most,
            ran=most,
        )
        for at in range(0, len(names), most)
    ]
    first = [kinds[names[0]]]
    found += [
        _case(f"{ran} of {asked} rounds", first, rounds=asked, ran=ran)
        for asked, ran in dict.fromkeys([(1, 1), (most, 1), (most, most - 1)])
    ]
    if UNDECIDED in kinds:  # the launch ends with that round
        found.append(_case(f"{UNDECIDED}, {most} rounds", [kinds[UNDECIDED]], rounds=most, ran=1))
    return [*found, _case("all rest", [nobody], rounds=1, ran=0)]


def launches_of(program: Program) -> list[Case]:
    """As `cases_of`, for a kernel that computes its scalars: a round follows from the one before.

    Every kind of round is a launch of its own; a kernel of several rounds is also asked for
    `FOLLOWING` of them, which run, and which stop after the first one. What a scheme draws is not
    known, so behind a round that is told what to emit it has one that emits nothing.
    """
    found = _launches_of_one_round(program)
    draws = program.round is not None and bool(program.round.forced)
    rounds = min(program.rounds_per_launch, 2 if draws else FOLLOWING)
    if rounds == 1:
        return found
    first = next(iter(_kinds_of(program).values()))
    whole, stopped = (_following(program, first, rounds, ran) for ran in (rounds, 1))
    if draws:
        whole = replace(whole, counts=(whole.counts[0], (0,) * program.batch))
    return [*found, whole, stopped]


def _following(program: Program, first: Kind, rounds: int, ran: int) -> Case:
    if program.round is not None:
        return following_case(program, first, rounds=rounds, ran=ran)
    kinds = [
        Kind(positions=tuple(one + index if one >= 0 else one for one in first.positions))
        for index in range(ran)
    ]
    return _case(f"{ran} of {rounds} rounds", kinds, rounds=rounds, ran=ran)


def _launches_of_one_round(program: Program) -> list[Case]:
    found = [_case(name, [one]) for name, one in _kinds_of(program).items()]
    leaves = program.round is not None or program.rounds_per_launch > 1
    return [*found, _case("all rest", [_nobody(program)], ran=0 if leaves else 1)]


def _kinds_of(program: Program) -> dict[str, Kind]:
    return _round_kinds(program) if program.round is not None else _kinds(program)


def _case(name: str, kinds: list[Kind], *, rounds: int = 1, ran: int = 1) -> Case:
    return Case(
        name=name,
        positions=tuple(one.positions for one in kinds),
        rows=tuple(one.rows for one in kinds),
        counts=tuple(one.counts for one in kinds),
        rounds=rounds,
        ran=ran,
    )


def _nobody(program: Program) -> Kind:
    nothing = (0,) * program.batch
    return Kind(positions=(RESTING,) * program.batch, rows=nothing, counts=nothing)


def _kinds(program: Program) -> dict[str, Kind]:
    """Positions by name.

    Tiles pass through a ring in one order, whatever their number is, so it is enough to have
    sequences of one tile, of more tiles than the ring has slots, of unequal numbers, and some that
    rest beside others that do not.
    """
    batch, last = program.batch, program.context - 1
    tile, slots = _tiles(program)
    long = min(last, (slots + 2) * tile - 1)
    kinds = {"short": (0,) * batch, "one awake": (RESTING,) * (batch - 1) + (min(last, 2 * tile),)}
    if program.caches:
        kinds |= {
            "long": (long,) * batch,
            "mixed": tuple(0 if sequence % 2 else long for sequence in range(batch)),
            "two tiles": (min(last, tile),) * batch,
        }
    return _different({name: Kind(positions=positions) for name, positions in kinds.items()})


def _round_kinds(program: Program) -> dict[str, Kind]:
    """As `_kinds`, with the rows that enter the caches.

    These fill one block of rows or two; they begin with a block, or behind old rows of one; a block
    begins with its tile, or inside of it. All rows count, or some, or one.
    """
    assert program.round is not None
    size, batch, last = program.round.rows_per_sequence, program.batch, program.context - 1
    tile, slots = _tiles(program)
    long = min(last - size, (slots + 2) * tile - 1)
    split = BLOCK_ROWS - 1  # of the rows at this position only the first fits into its block
    firsts = {
        "short": [0],
        "two blocks": [split, split + BLOCK_ROWS],
        "two tiles": [tile - 1, tile],
        "behind a tile": [tile],
        "long": [long],
        "mixed": [long, 0, split],
        "end": [last],
    }
    kinds: dict[str, Kind] = {}
    for name, some in firsts.items():
        positions = tuple(min(one, last) for one in islice(cycle(some), batch))
        rows = tuple(min(size, program.context - one) for one in positions)
        for what, counts in (
            ("all", rows),
            ("some", tuple(1 + (at + one // 2) % one for at, one in enumerate(rows))),
            ("one", (1,) * batch),
        ):
            kinds[f"{name}, {what}"] = Kind(positions=positions, rows=rows, counts=counts)
    ones = (1,) * batch
    kinds["no drafts"] = Kind(positions=(min(tile, last),) * batch, rows=ones, counts=ones)
    resting = batch - 1
    kinds["one awake"] = Kind(
        positions=(RESTING,) * resting + (min(last - size, 2 * tile + split),),
        rows=(0,) * resting + (size,),
        counts=(0,) * resting + (size - 1,),
    )
    if program.round.forced:
        mixed = kinds["mixed, some"]
        kinds[UNDECIDED] = replace(mixed, counts=(0, *mixed.counts[1:]))
    return _different(kinds)


def _tiles(program: Program) -> tuple[int, int]:
    """Positions of the largest tile, slots of the longest ring."""
    tile = max((one.tile for one in program.caches), default=1)
    return tile, max((one.slots for one in program.caches), default=1)


def _different(kinds: dict[str, Kind]) -> dict[str, Kind]:
    """Every kind once, under its first name."""
    first = {kind: name for name, kind in reversed(kinds.items())}
    return {name: kind for kind, name in reversed(first.items())}


def following_case(program: Program, first: Kind, *, rounds: int, ran: int) -> Case:
    """A launch of a scheme whose rounds follow one another as they do in the kernel when all drafts
    but those of the first round are accepted."""
    assert program.round is not None
    size = program.round.rows_per_sequence
    kinds = [first]
    for _ in range(1, ran):
        before = kinds[-1]
        starts = [
            one + count if one >= 0 and one + count < program.context else RESTING
            for one, count in zip(before.positions, before.counts, strict=True)
        ]
        rows = tuple(min(size, program.context - one) if one >= 0 else 0 for one in starts)
        kinds.append(Kind(positions=tuple(starts), rows=rows, counts=rows))
    return _case(f"{ran} of {rounds} rounds", kinds, rounds=rounds, ran=ran)
