"""What the costs of phases are made of: machine code, pushes, registers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import WORD_BITS
from mkc.schedule.program import Program
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.targets import Target

ROWS_PER_PUSH = 16  # a push carries a pair of bf16 registers: 16 rows of a weight block
SEARCH_CHUNK = 256  # columns per step of the search for the largest logit
SUM_CHUNK = 512  # columns per step of the sum of their weights
RACE_CHUNK = 1024  # columns per step of a race
LIST_STEPS = 8  # of the loop in which every entry of a list meets every other one
MASK_BLOCK = WORD_BITS * VECTOR_LANES  # columns per step of masking the logits
MASK_PASSES = 2  # of the logits, in front of the search among them: load and store


class Source(StrEnum):
    """Where a phase's time comes from."""

    MACHINE_CODE = "machine code"
    PUSH_RATE = "push rate"  # the machine code's pushes at the target's rate
    TARGET = "target file"


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """Core time of a phase.

    Attributes:
      once_us: per execution, outside what follows.
      item_us: per sequence, for phases that go through sequences.
      tile_us: per cache tile for attention; per output step for matmuls, one for each tile run,
        without the drain of the matrix unit.
    """

    source: Source
    once_us: float
    item_us: float = 0.0
    tile_us: tuple[float, ...] = ()


def push_us(pushes: float, target: Target) -> float:
    """Time of push instructions when all matrix units are kept busy."""
    return pushes * target.mxu.push_us * ROWS_PER_PUSH / target.mxu.width


def code_us(code: PhaseCycles, target: Target) -> float:
    """Time of the bundles outside of loops."""
    return max(code.cycles / target.core.clock_mhz, push_us(code.pushes, target))


@dataclass(frozen=True, kw_only=True)
class Trips:
    """A loop as the source has it.

    Attributes:
      count: of iterations.
      inner: loops in its body, in order.
      runs_until: a loop that ends by what it finds; it stays a loop with one iteration, too.
    """

    count: int
    inner: tuple[Trips, ...] = ()
    runs_until: bool = False


def nested(code: PhaseCycles, loops: tuple[Trips, ...], target: Target) -> PhaseCost | None:
    """A phase with such loops; None when its machine code has others.

    The compiler unrolls a loop of one iteration.
    """
    found = _nested_us(code, loops, target)
    return None if found is None else PhaseCost(source=Source.MACHINE_CODE, once_us=found)


def looped(code: PhaseCycles, trips: tuple[int, ...], target: Target) -> PhaseCost | None:
    """As `nested`, for loops of so many iterations, one after the other."""
    return nested(code, tuple(Trips(count=one) for one in trips), target)


def _nested_us(code: PhaseCycles, loops: tuple[Trips, ...], target: Target) -> float | None:
    kept = _not_unrolled(loops)
    if len(kept) != len(code.loops):
        return None
    total = code_us(code, target)
    for trips, one in zip(kept, code.loops, strict=True):
        body_us = _nested_us(one, trips.inner, target)
        if body_us is None:
            return None
        total += trips.count * body_us
    return total


def _not_unrolled(loops: tuple[Trips, ...]) -> list[Trips]:
    found: list[Trips] = []
    for one in loops:
        if one.count > 1 or one.runs_until:
            found.append(one)
        elif one.count == 1:
            found += _not_unrolled(one.inner)
    return found


def exchange_plan(program: Program, name: str) -> ExchangePlan:
    """The buffers of an exchange."""
    return next(one for one in program.exchanges if one.name == name)


def block_us(tape_rows: int, target: Target) -> float:
    """Pushes of `tape_rows` rows of a block of columns."""
    return tape_rows / target.mxu.width * target.mxu.push_us


def registers_us(program: Program, lanes: int, target: Target) -> float:
    """One multiply-add for each element of so many lanes, all rows."""
    return elements_us(program.padded_rows * lanes, target)


def elements_us(elements: int, target: Target) -> float:
    """One multiply-add for each element."""
    registers = elements / (target.core.lanes * target.core.sublanes)
    return registers / target.core.multiply_adds_per_cycle / target.core.clock_mhz
