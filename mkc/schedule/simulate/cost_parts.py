"""What the costs of phases are made of: machine code, pushes, registers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mkc.schedule.program import ExchangePlan
from mkc.schedule.program import Program
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.targets import Target

ROWS_PER_PUSH = 16  # a push carries a pair of bf16 registers: 16 rows of a weight block
SEARCH_CHUNK = 256  # columns per step of the search for the largest logit


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


def looped(code: PhaseCycles, trips: tuple[int, ...], target: Target) -> PhaseCost | None:
    """A phase with loops of so many iterations, one after the other.

    The compiler unrolls a loop of one iteration.
    """
    repeated = [count for count in trips if count > 1]
    if len(code.loops) != len(repeated) or any(one.loops for one in code.loops):
        return None
    pairs = zip(repeated, code.loops, strict=True)
    loops_us = sum(count * code_us(one, target) for count, one in pairs)
    return PhaseCost(source=Source.MACHINE_CODE, once_us=code_us(code, target) + loops_us)


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
