"""Costs of the phases that only rounds of speculative schemes have; see `costs`."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from mkc.schedule.exchange_plan import Part
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.messages import summed_elements
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SampledAccept
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import LIST_STEPS
from mkc.schedule.simulate.cost_parts import MASK_BLOCK
from mkc.schedule.simulate.cost_parts import MASK_PASSES
from mkc.schedule.simulate.cost_parts import RACE_CHUNK
from mkc.schedule.simulate.cost_parts import SEARCH_CHUNK
from mkc.schedule.simulate.cost_parts import SUM_CHUNK
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.cost_parts import Trips
from mkc.schedule.simulate.cost_parts import block_us
from mkc.schedule.simulate.cost_parts import code_us
from mkc.schedule.simulate.cost_parts import elements_us
from mkc.schedule.simulate.cost_parts import exchange_plan
from mkc.schedule.simulate.cost_parts import looped
from mkc.schedule.simulate.cost_parts import nested
from mkc.schedule.simulate.cost_parts import registers_us
from mkc.schedule.simulate.costs_experts import expert_us
from mkc.schedule.simulate.costs_experts import plan_and_ring
from mkc.schedule.simulate.costs_experts import route_us
from mkc.targets import Target

ROUND_PHASES = (
    AcceptPhase,
    AllGatherPhase,
    CutDraftsPhase,
    KeptDeltaRulePhase,
    ExpertsPhase,
    LatentAttentionPhase,
    MarkovWalkPhase,
    RoutePhase,
    RowsAttentionPhase,
    ScalarPhase,
    SelectorWalkPhase,
    TapPhase,
    TopKPhase,
)
EXACT_PASSES = 6  # products of bf16 parts that make up one of f32 numbers
ATTENTION_CHAINS = 3  # sums over lanes, one after the other: maximum, sum, rescaling
DELTA_CHAINS = 3  # dependent products: commit, from the state, between rows
MARKOV_CHAINS = 3  # the row of the choice before, the product, the search over lanes
TOP_K_WORK = 12  # operations on each column: three places are kept in order
SUM_WORK = 20  # of a weight: a quotient, an exponential, comparisons
RACE_WORK = 180  # of a column: 20 rounds of the random numbers, a logarithm, its weight
SCALAR_US = 0.005  # a statement on scalars: a load, arithmetic, a store


def round_code(
    program: Program, phase: Phase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """From machine code; None when its loops are not those that are expected."""
    match phase:
        case KeptDeltaRulePhase():
            return _delta_code(program, phase, code, target)
        case RowsAttentionPhase() | LatentAttentionPhase():
            return _attention_code(code, target)
        case RoutePhase():
            return _route_code(program, phase, code, target)
        case ExpertsPhase():
            return _experts_code(code, target)
        case SelectorWalkPhase():
            return _walk_code(program, code, target)
        case MarkovWalkPhase():
            return _markov_code(program, phase, code, target)
        case AcceptPhase() if phase.sampling is not None:
            return nested(code, _draw_loops(program, phase, phase.sampling), target)
        case AcceptPhase():
            masked = phase.logits.width // MASK_BLOCK if phase.masks else 0
            chunks = phase.logits.width // SEARCH_CHUNK
            return looped(code, (masked, chunks, program.batch), target)
        case TopKPhase():
            return nested(code, (_search_loop(phase.logits.width, phase.k),), target)
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
    """A loop over the sequences that do not rest, and in it one over tiles (of latents: all tiles
    but a sequence's last)."""
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


def _route_code(
    program: Program, phase: RoutePhase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """A loop over registers of rows where there are several, then one that starts loads, whose time
    is that of the copies."""
    _, ring = plan_and_ring(program, phase.experts)
    blocks = ceil(ring.rows / target.core.sublanes)
    if not code.loops:
        return None
    return looped(replace(code, loops=code.loops[:-1]), (blocks,), target)


def _experts_code(code: PhaseCycles, target: Target) -> PhaseCost | None:
    """A loop over experts, and behind it the second product of the last one."""
    if len(code.loops) != 1 or code.loops[0].loops:
        return None
    return PhaseCost(
        source=Source.MACHINE_CODE,
        once_us=code_us(code, target),
        item_us=code_us(code.loops[0], target),
    )


def _walk_code(program: Program, code: PhaseCycles, target: Target) -> PhaseCost | None:
    """Loops that begin, then one over rows, whose own loops start and await copies: their time is
    that of the copies. Of several sequences each chooses in a loop behind these."""
    batch = program.batch
    first, inner = (1, 2) if batch == 1 else (2, 5)
    if len(code.loops) != first + 1 or len(code.loops[-1].loops) != inner:
        return None
    if any(one.loops for one in (*code.loops[:-1], *code.loops[-1].loops)):
        return None
    row = code.loops[-1]
    item_us = code_us(row, target) / batch
    if batch > 1:
        item_us += code_us(row.loops[-1], target)
    return PhaseCost(source=Source.MACHINE_CODE, once_us=code_us(code, target), item_us=item_us)


def _markov_code(
    program: Program, phase: MarkovWalkPhase, code: PhaseCycles, target: Target
) -> PhaseCost | None:
    """Rows are written out one by one: loops that start and await the copies of all sequences, and
    one that searches the columns."""
    assert program.round is not None
    chunks = phase.logits.width // SEARCH_CHUNK
    drafts = program.round.rows_per_sequence - 1
    cost = looped(code, (program.batch, program.batch, chunks) * drafts, target)
    return cost and replace(cost, once_us=0.0, item_us=cost.once_us / drafts)


def _search_loop(width: int, k: int) -> Trips:
    """One pass over the columns, then a loop over places; more passes are needed rarely."""
    inner = (Trips(count=width // SEARCH_CHUNK), Trips(count=k))
    return Trips(count=1, inner=inner, runs_until=True)


def _draw_loops(program: Program, phase: AcceptPhase, sampling: SampledAccept) -> tuple[Trips, ...]:
    """Masks; the list of the largest logits, the sum over all, the order of the list; then each
    sequence counts, races over the columns, and emits."""
    width, batch = phase.logits.width, program.batch
    return (
        Trips(count=width // MASK_BLOCK if phase.masks else 0),
        _search_loop(width, sampling.listed),
        Trips(count=width // SUM_CHUNK),
        Trips(count=LIST_STEPS),
        Trips(count=batch),
        Trips(count=batch, inner=(Trips(count=width // RACE_CHUNK),)),
        Trips(count=batch),
    )


def round_estimate(program: Program, phase: Phase, target: Target) -> PhaseCost:
    """From the target's figures alone."""
    rows = program.round.rows_per_sequence if program.round else 1
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
        case LatentAttentionPhase():
            # Of a tile latents are pushed for scores and for sums, shared keys once. In all, `up`
            # is pushed once, half for queries, half for values; f32 numbers travel in two
            # pieces, which are rows of one product. The last tile of a sequence, and the softmax of
            # its new rows, are part of its item.
            cache = next(one for one in program.caches if one.name == phase.cache)
            latents, shared = (ceil(width / TAPE_LANES) for width in cache.widths)
            pushes = block_us(cache.tile * (2 * latents + shared), target)
            queries = rows * phase.heads
            tile_us = pushes + elements_us(4 * queries * cache.tile, target)
            tiles = (tile_us + ATTENTION_CHAINS * chain_us,)
            ups = phase.heads * (phase.key_dim + phase.value_dim) * latents
            once_us = block_us(ups, target) + 2 * chain_us
            item_us = tile_us + 2 * ATTENTION_CHAINS * chain_us
        case RoutePhase():
            once_us = route_us(program, phase, target)
        case ExpertsPhase():
            item_us = expert_us(program, phase, target)
        case TapPhase():
            once_us = registers_us(program, 2 * phase.width, target)
        case AllGatherPhase() if phase.part is not Part.START:
            gathered = exchange_plan(program, phase.exchange)
            once_us = elements_us(summed_elements(gathered, program.ranks), target)
        case TopKPhase():
            once_us = phase.k * chain_us
            once_us += registers_us(program, TOP_K_WORK * phase.logits.width, target)
        case AcceptPhase():
            passes = 2 + (MASK_PASSES if phase.masks else 0)
            once_us = chain_us + registers_us(program, passes * phase.logits.width, target)
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
        case MarkovWalkPhase():
            # the whole table is pushed for every row; each logit is copied, corrected and searched
            height = ceil(program.batch / target.core.sublanes) * target.core.sublanes
            pushes = ceil(phase.logits.width / TAPE_LANES) * phase.rank
            work_us = elements_us(5 * height * phase.logits.width, target)
            item_us = block_us(pushes, target) + work_us + MARKOV_CHAINS * chain_us
        case CutDraftsPhase():
            once_us = chain_us + program.rows * SCALAR_US
        case ScalarPhase():
            once_us = len(phase.nodes) * program.rows * SCALAR_US
    return PhaseCost(source=Source.TARGET, once_us=once_us, item_us=item_us, tile_us=tiles)
