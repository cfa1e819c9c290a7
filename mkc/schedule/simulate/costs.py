"""How long a phase keeps the core busy: from its machine code when that is known, else estimated.

Either way the matrix unit takes at least the target's time for the weights that are pushed. Waits
for copies and messages are not in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import WORD_BITS
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import ExchangePlan
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.targets import Target

ROWS_PER_PUSH = 16  # a push carries a pair of bf16 registers: 16 rows of a weight block
ARGMAX_CHUNK = 256  # columns per step of the search for the largest logit
MASK_BLOCK = WORD_BITS * VECTOR_LANES  # columns per step of masking the logits
ATTENTION_CHAINS = 3  # sums over lanes of a tile, one after the other: maximum, sum, rescaling
DELTA_CHAINS = 2  # dependent products of the delta rule: prediction, output
F32_BYTES = 4


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


def phase_costs(
    program: Program, target: Target, cycles: Mapping[str, PhaseCycles]
) -> dict[str, PhaseCost]:
    """The cost of every phase by id.

    Args:
      cycles: machine code of phases (`bundles.bundle_costs`); phases that it lacks, or whose loops
        are not those of the program, are estimated.
    """
    costs: dict[str, PhaseCost] = {}
    for phase in program.phases():
        code = cycles.get(phase.id)
        measured = _from_code(program, phase, code, target) if code else None
        costs[phase.id] = measured or _estimated(program, phase, target)
    return costs


def push_us(pushes: float, target: Target) -> float:
    """Time of push instructions when all matrix units are kept busy."""
    return pushes * target.mxu.push_us * ROWS_PER_PUSH / target.mxu.width


def _code_us(code: PhaseCycles, target: Target) -> float:
    return max(code.cycles / target.core.clock_mhz, push_us(code.pushes, target))


def _step_us(code: PhaseCycles, target: Target) -> float:
    """A matmul step without the drain that its machine code waits for at the end."""
    instructions_us = code.cycles / target.core.clock_mhz - target.mxu.drain_us
    return max(instructions_us, push_us(code.pushes, target))


def _from_code(
    program: Program, phase: Phase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    match phase:
        case MatmulPhase():
            return _matmul_code(phase, code, target)
        case AttentionPhase():
            return _attention_code(code, target)
        case DeltaRulePhase():
            return _delta_code(program, phase, code, target)
        case ArgmaxPhase():
            masked = phase.logits.width // MASK_BLOCK if phase.masks else 0
            return _looped(code, (masked, phase.logits.width // ARGMAX_CHUNK), target)
        case EmbedPhase():
            return _looped(code, (program.batch,), target)
        case _:
            return _looped(code, (), target)


def _looped(code: PhaseCycles, trips: tuple[int, ...], target: Target) -> PhaseCost | None:
    """A phase with loops of so many iterations, one after the other.

    The compiler unrolls a loop of one iteration.
    """
    looped = [count for count in trips if count > 1]
    if len(code.loops) != len(looped) or any(one.loops for one in code.loops):
        return None
    pairs = zip(looped, code.loops, strict=True)
    loops_us = sum(count * _code_us(one, target) for count, one in pairs)
    return PhaseCost(source=Source.MACHINE_CODE, once_us=_code_us(code, target) + loops_us)


def _matmul_code(phase: MatmulPhase, code: PhaseCycles, target: Target) -> PhaseCost | None:
    """Runs of several steps are loops; runs of one step stand in the code between them."""
    looped = [run for run in phase.runs if run.count > 1]
    inlined = len(phase.runs) - len(looped)
    if len(code.loops) != len(looped) or any(one.loops for one in code.loops):
        return None
    bodies = iter(code.loops)
    share = 1.0 / max(1, inlined)
    one_step = PhaseCycles(bundles=0, cycles=code.cycles * share, pushes=round(code.pushes * share))
    steps = [next(bodies) if run.count > 1 else one_step for run in phase.runs]
    pushed = all(_step_us(one, target) == push_us(one.pushes, target) for one in steps)
    return PhaseCost(
        source=Source.PUSH_RATE if pushed else Source.MACHINE_CODE,
        once_us=0.0 if inlined else code.cycles / target.core.clock_mhz,
        tile_us=tuple(_step_us(one, target) for one in steps),
    )


def _attention_code(code: PhaseCycles, target: Target) -> PhaseCost | None:
    """A loop over tiles, in a loop over sequences unless there is one sequence."""
    if len(code.loops) != 1:
        return None
    outer = code.loops[0]
    if not outer.loops:
        return PhaseCost(
            source=Source.MACHINE_CODE,
            once_us=0.0,
            item_us=_code_us(code, target),
            tile_us=(_code_us(outer, target),),
        )
    return PhaseCost(
        source=Source.MACHINE_CODE,
        once_us=_code_us(code, target),
        item_us=_code_us(outer, target),
        tile_us=(sum(_code_us(one, target) for one in outer.loops),),
    )


def _delta_code(
    program: Program, phase: DeltaRulePhase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """A loop over sequences unless there is one, and in it one over heads when they are many."""
    once_us, item = 0.0, code
    if program.batch > 1:
        if len(code.loops) != 1:
            return None
        once_us, item = _code_us(code, target), code.loops[0]
    if len(item.loops) > 1 or any(one.loops for one in item.loops):
        return None
    heads_us = sum(phase.key_heads * _code_us(one, target) for one in item.loops)
    return PhaseCost(
        source=Source.MACHINE_CODE, once_us=once_us, item_us=_code_us(item, target) + heads_us
    )


def _estimated(program: Program, phase: Phase, target: Target) -> PhaseCost:
    """From the target's figures alone."""
    once_us, item_us = 0.0, 0.0
    tiles: tuple[float, ...] = ()
    chain_us = target.core.vector_chain_us
    match phase:
        case MatmulPhase():
            tiles = tuple(
                _block_us(phase.K * phase.step_blocks(run.first), target) for run in phase.runs
            )
        case NarrowMatmulPhase():
            once_us = _block_us(phase.K, target) + chain_us
        case VectorPhase():
            views = (*phase.reads.values(), *phase.writes.values())
            lanes = sum(view.width for view in views) + len(phase.nodes) * _widest(views)
            once_us = chain_us + _registers_us(program, lanes, target)
        case DeltaRulePhase():
            state = phase.value_heads * phase.key_dim * phase.value_dim
            work = _elements_us(4 * state, target)  # decay, two products, update
            item_us = work + DELTA_CHAINS * chain_us
        case AttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            pushes = _block_us(2 * cache.tile * ceil(cache.width / TAPE_LANES), target)
            tiles = (pushes + ATTENTION_CHAINS * chain_us,)
            item_us = chain_us
        case AllReducePhase():
            plan = exchange_plan(program, phase.exchange)
            once_us = _elements_us(program.ranks * plan.rows * plan.columns, target)
        case ArgmaxPhase():
            passes = 4 if phase.masks else 2
            once_us = chain_us + _registers_us(program, passes * phase.logits.width, target)
        case EmbedPhase():
            once_us = program.batch * _registers_us(program, 2 * phase.output.width, target)
    return PhaseCost(source=Source.TARGET, once_us=once_us, item_us=item_us, tile_us=tiles)


def exchange_plan(program: Program, name: str) -> ExchangePlan:
    """The buffers of an exchange."""
    return next(one for one in program.exchanges if one.name == name)


def _widest(views: tuple[View, ...]) -> int:
    return max((view.width for view in views), default=0)


def _block_us(tape_rows: int, target: Target) -> float:
    """Pushes of `tape_rows` rows of a block of columns."""
    return tape_rows / target.mxu.width * target.mxu.push_us


def _registers_us(program: Program, lanes: int, target: Target) -> float:
    return _elements_us(program.padded_rows * lanes, target)


def _elements_us(elements: int, target: Target) -> float:
    """One multiply-add for each element."""
    registers = elements / (target.core.lanes * target.core.sublanes)
    return registers / target.core.multiply_adds_per_cycle / target.core.clock_mhz
