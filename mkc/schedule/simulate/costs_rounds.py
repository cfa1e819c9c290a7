"""Costs of the phases that only rounds of speculative schemes have; see `costs`."""

from __future__ import annotations

from math import ceil

from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import SEARCH_CHUNK
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.cost_parts import block_us
from mkc.schedule.simulate.cost_parts import code_us
from mkc.schedule.simulate.cost_parts import elements_us
from mkc.schedule.simulate.cost_parts import exchange_plan
from mkc.schedule.simulate.cost_parts import looped
from mkc.schedule.simulate.cost_parts import registers_us
from mkc.targets import Target

ROUND_PHASES = (
    AcceptPhase,
    AllGatherPhase,
    KeptDeltaRulePhase,
    RowsAttentionPhase,
    ScalarPhase,
    SelectorWalkPhase,
    TapPhase,
    TopKPhase,
)
EXACT_PASSES = 6  # products of bf16 parts that make up one of f32 numbers
ATTENTION_CHAINS = 3  # sums over lanes, one after the other: maximum, sum, rescaling
DELTA_CHAINS = 3  # dependent products: commit, from the state, between rows
TOP_K_WORK = 12  # operations on each column: three places are kept in order
SUM_WORK = 20  # of a weight: a quotient, an exponential, comparisons
RACE_WORK = 180  # of a column: 20 rounds of the random numbers, a logarithm, its weight
SCALAR_US = 0.005  # a statement on scalars: a load, arithmetic, a store


def round_code(
    program: Program, phase: Phase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """From machine code; None when its loops are not those that are expected."""
    plan = program.round
    assert plan is not None
    match phase:
        case KeptDeltaRulePhase():
            return _delta_code(program, phase, code, target)
        case RowsAttentionPhase():
            return _attention_code(code, target)
        case SelectorWalkPhase():
            return _walk_code(code, target)
        case AcceptPhase() if phase.sampling is not None:
            return None
        case AcceptPhase():
            chunks = phase.logits.width // SEARCH_CHUNK
            return looped(code, (chunks, program.batch), target)
        case TopKPhase():
            return _top_k_code(phase, code, target)
        case ScalarPhase():
            return looped(code, (program.batch,) * len(phase.nodes), target)
        case _:
            return looped(code, (), target)


def _delta_code(
    program: Program, phase: KeptDeltaRulePhase, code: PhaseCycles, target: Target
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


def _attention_code(code: PhaseCycles, target: Target) -> PhaseCost | None:
    """A loop over the sequences that do not rest, and in it one over tiles."""
    if len(code.loops) != 1 or len(code.loops[0].loops) != 1:
        return None
    (item,) = code.loops
    (tile,) = item.loops
    if tile.loops:
        return None
    return PhaseCost(
        source=Source.MACHINE_CODE,
        once_us=code_us(code, target),
        item_us=code_us(item, target),
        tile_us=(code_us(tile, target),),
    )


def _walk_code(code: PhaseCycles, target: Target) -> PhaseCost | None:
    """A loop that starts copies, then one over rows, whose own loops start and await copies: their
    time is that of the copies."""
    if len(code.loops) != 2 or code.loops[0].loops:
        return None
    return PhaseCost(
        source=Source.MACHINE_CODE,
        once_us=code_us(code, target),
        item_us=code_us(code.loops[1], target),
    )


def _top_k_code(phase: TopKPhase, code: PhaseCycles, target: Target) -> PhaseCost | None:
    """One pass over the columns, then a loop over places; more passes are needed rarely."""
    if len(code.loops) != 1 or len(code.loops[0].loops) != 2:
        return None
    one_pass = code.loops[0]
    columns, places = one_pass.loops
    pass_us = code_us(one_pass, target) + phase.k * code_us(places, target)
    pass_us += phase.logits.width // SEARCH_CHUNK * code_us(columns, target)
    return PhaseCost(source=Source.MACHINE_CODE, once_us=code_us(code, target) + pass_us)


def round_estimate(program: Program, phase: Phase, target: Target) -> PhaseCost:
    """From the target's figures alone."""
    plan = program.round
    assert plan is not None
    rows = plan.rows_per_sequence
    once_us, item_us = 0.0, 0.0
    tiles: tuple[float, ...] = ()
    chain_us = target.core.vector_chain_us
    match phase:
        case KeptDeltaRulePhase():
            # the state is a weight of one product, and one of three vector operations: decay, sum,
            # choice; each row of the triangular system is taken off all others
            blocks = ceil(phase.value_dim / TAPE_LANES)
            pushes = block_us(phase.value_heads * phase.key_dim * blocks, target)
            state = phase.value_heads * phase.key_dim * phase.value_dim
            solved = 2 * rows * rows * phase.value_heads * phase.value_dim
            work_us = elements_us(3 * state + solved, target)
            item_us = EXACT_PASSES * pushes + work_us + (DELTA_CHAINS + rows) * chain_us
        case RowsAttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            pushes = block_us(2 * cache.tile * ceil(cache.width / TAPE_LANES), target)
            queries = rows * phase.heads
            softmax_us = elements_us(4 * queries * cache.tile, target)
            tiles = (pushes + softmax_us + ATTENTION_CHAINS * chain_us,)
            item_us = (1 + ATTENTION_CHAINS) * chain_us
        case TapPhase():
            once_us = registers_us(program, 2 * phase.width, target)
        case AllGatherPhase():
            gathered = exchange_plan(program, phase.exchange)
            once_us = elements_us(program.ranks * gathered.rows * gathered.columns, target)
        case TopKPhase():
            once_us = phase.k * chain_us
            once_us += registers_us(program, TOP_K_WORK * phase.logits.width, target)
        case AcceptPhase():
            once_us = chain_us + registers_us(program, 2 * phase.logits.width, target)
            once_us += program.rows * SCALAR_US
            if phase.sampling is not None:
                # the list and the sum of all rows, then a race of one row of each sequence
                once_us += phase.sampling.listed * chain_us
                once_us += registers_us(
                    program, (TOP_K_WORK + SUM_WORK) * phase.logits.width, target
                )
                once_us += elements_us(program.batch * RACE_WORK * phase.logits.width, target)
        case SelectorWalkPhase():
            item_us = chain_us + elements_us(3 * phase.k * phase.rank, target)
        case ScalarPhase():
            once_us = len(phase.nodes) * program.rows * SCALAR_US
    return PhaseCost(source=Source.TARGET, once_us=once_us, item_us=item_us, tile_us=tiles)
