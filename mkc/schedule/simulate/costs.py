"""How long a phase keeps the core busy: from its machine code when that is known, else estimated.

Either way the matrix unit takes at least the target's time for the weights that are pushed. Waits
for copies and messages are not in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from mkc.schedule.exchange_plan import Part
from mkc.schedule.messages import summed_elements
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import MASK_BLOCK
from mkc.schedule.simulate.cost_parts import MASK_PASSES
from mkc.schedule.simulate.cost_parts import SEARCH_CHUNK
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.cost_parts import block_us
from mkc.schedule.simulate.cost_parts import code_us
from mkc.schedule.simulate.cost_parts import elements_us
from mkc.schedule.simulate.cost_parts import exchange_plan
from mkc.schedule.simulate.cost_parts import looped
from mkc.schedule.simulate.cost_parts import push_us
from mkc.schedule.simulate.cost_parts import registers_us
from mkc.schedule.simulate.costs_rounds import ROUND_PHASES
from mkc.schedule.simulate.costs_rounds import round_code
from mkc.schedule.simulate.costs_rounds import round_estimate
from mkc.targets import Target

ATTENTION_CHAINS = 3  # sums over lanes of a tile, one after the other: maximum, sum, rescaling
DELTA_CHAINS = 2  # dependent products of the delta rule: prediction, output


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
        if isinstance(phase, ROUND_PHASES):
            measured = round_code(program, phase, code, target) if code else None
            costs[phase.id] = measured or round_estimate(program, phase, target)
            continue
        measured = _from_code(program, phase, code, target) if code else None
        costs[phase.id] = measured or _estimated(program, phase, target)
    return costs


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
            return looped(code, (masked, phase.logits.width // SEARCH_CHUNK), target)
        case EmbedPhase():
            return looped(code, (program.rows,), target)
        case StoreBlockPhase():
            return _store_code(phase, code, target)
        case _:
            return looped(code, (), target)


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
            item_us=code_us(code, target),
            tile_us=(code_us(outer, target),),
        )
    return PhaseCost(
        source=Source.MACHINE_CODE,
        once_us=code_us(code, target),
        item_us=code_us(outer, target),
        tile_us=(sum(code_us(one, target) for one in outer.loops),),
    )


def _delta_code(
    program: Program, phase: DeltaRulePhase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """A loop over sequences unless there is one, and in it one over heads when they are many."""
    once_us, item = 0.0, code
    if program.batch > 1:
        if len(code.loops) != 1:
            return None
        once_us, item = code_us(code, target), code.loops[0]
    if len(item.loops) > 1 or any(one.loops for one in item.loops):
        return None
    heads_us = sum(phase.key_heads * code_us(one, target) for one in item.loops)
    return PhaseCost(
        source=Source.MACHINE_CODE, once_us=once_us, item_us=code_us(item, target) + heads_us
    )


def _store_code(phase: StoreBlockPhase, code: PhaseCycles, target: Target) -> PhaseCost | None:
    """Most executions store nothing: their loop has no iteration. The mean of all of them."""
    if len(code.loops) != 1 or code.loops[0].loops:
        return None
    moved_us = code_us(code.loops[0], target) / phase.period
    return PhaseCost(source=Source.MACHINE_CODE, once_us=code_us(code, target) + moved_us)


def _estimated(program: Program, phase: Phase, target: Target) -> PhaseCost:
    """From the target's figures alone."""
    once_us, item_us = 0.0, 0.0
    tiles: tuple[float, ...] = ()
    chain_us = target.core.vector_chain_us
    match phase:
        case MatmulPhase():
            products = 1 + len(phase.also)
            tiles = tuple(
                products * block_us(phase.K * phase.step_blocks(run.first), target)
                for run in phase.runs
            )
        case NarrowMatmulPhase():
            once_us = block_us(phase.K, target) + chain_us
        case VectorPhase():
            views = (*phase.reads.values(), *phase.writes.values())
            lanes = sum(view.width for view in views) + len(phase.nodes) * _widest(views)
            once_us = chain_us + registers_us(program, lanes, target)
        case DeltaRulePhase():
            state = phase.value_heads * phase.key_dim * phase.value_dim
            work = elements_us(4 * state, target)  # decay, two products, update
            item_us = work + DELTA_CHAINS * chain_us
        case AttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            pushes = block_us(2 * cache.tile * ceil(cache.width / TAPE_LANES), target)
            tiles = (pushes + ATTENTION_CHAINS * chain_us,)
            item_us = chain_us
        case AllReducePhase() if phase.part is not Part.START:
            plan = exchange_plan(program, phase.exchange)
            once_us = elements_us(summed_elements(plan, program.ranks), target)
        case ArgmaxPhase():
            passes = 2 + (MASK_PASSES if phase.masks else 0)
            once_us = chain_us + registers_us(program, passes * phase.logits.width, target)
        case ClearBlocksPhase():
            once_us = registers_us(program, phase.blocks.width, target)
        case StoreBlockPhase():
            once_us = registers_us(program, 2 * phase.residual.width, target) / phase.period
        case EmbedPhase():
            once_us = program.rows * registers_us(program, 2 * phase.output.width, target)
    return PhaseCost(source=Source.TARGET, once_us=once_us, item_us=item_us, tile_us=tiles)


def _widest(views: tuple[View, ...]) -> int:
    return max((view.width for view in views), default=0)
