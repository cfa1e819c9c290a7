"""Sizes that belong together: operands and what their phase asks of them, exchanges and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mkc.schedule.exchange_plan import scattered_columns
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import VECTOR_LANES
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
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.verify.arrays import SCALAR_ROLES
from mkc.schedule.verify.arrays import VECTOR_ROWS
from mkc.schedule.verify.memory import Report
from mkc.schedule.verify.parts import check_parts

type Width = tuple[str, View, int]
"""What a view is to its phase, and how many lanes it has to have."""


def check_shapes(program: Program, report: Report) -> bool:
    """Returns False when nothing else can be said: a ring without slots, a refill without cases, an
    exchange of another kind than its phase or without its end."""
    _check_operands(program, report)
    _check_pages(program, report)
    _check_taps(program, report)
    runs = [_check_rings(program, report), check_parts(program, report)]
    for phase in program.phases():
        for what, view, lanes in widths(phase):
            if view.width != lanes:
                message = f"{what} has {view.width} lanes where the phase takes {lanes}"
                report("V803", phase.id, message)
        _check_scalars(program, phase, report)
        runs += [_check_exchange(program, phase, report), _check_refills(phase, report)]
    return all(runs)


def widths(phase: Phase) -> Iterator[Width]:
    """What a phase asks of the widths of its operands, beyond that they lie in their buffers."""
    match phase:
        case NarrowMatmulPhase():
            yield "the left operand", phase.left, phase.K
        case DeltaRulePhase() | KeptDeltaRulePhase():
            keys, values = phase.key_heads * phase.key_dim, phase.value_heads * phase.value_dim
            yield from (("q", phase.q, keys), ("k", phase.k, keys), ("v", phase.v, values))
            yield "the output", phase.output, values
        case AttentionPhase() | RowsAttentionPhase():
            queries, keys = phase.heads * phase.head_dim, phase.kv_heads * phase.head_dim
            yield from (("q", phase.q, queries), ("k", phase.k, keys), ("v", phase.v, keys))
            yield "the output", phase.output, queries
            if isinstance(phase, RowsAttentionPhase) and phase.remembered is not None:
                yield "a remembered k", phase.remembered.k, keys
                yield "a remembered v", phase.remembered.v, keys
        case LatentAttentionPhase():
            yield "q", phase.q, phase.heads * (phase.key_dim + phase.shared_dim)
            yield "the shared key", phase.shared, phase.shared_dim
            yield "the output", phase.output, phase.heads * phase.value_dim
        case RoutePhase():
            yield from (("ids", phase.ids, phase.k), ("weights", phase.weights, phase.k))
        case ExpertsPhase():
            yield "the output", phase.output, phase.x.width
        case StoreBlockPhase():
            yield "the blocks", phase.blocks, phase.slots * phase.residual.width
        case AllReducePhase():
            group = max(1, phase.group)
            scattered = phase.scattered - phase.scattered // group
            yield "the sum", phase.output, phase.partial.width - scattered


def scalar_sizes(program: Program, phase: Phase) -> dict[str, int]:
    """How many scalars a phase of a round takes from each array, or puts there."""
    rows, batch = program.rows, program.batch
    match phase:
        case AcceptPhase():
            by_row = (phase.tokens, phase.positions, phase.emitted)
            return {**dict.fromkeys(by_row, rows), phase.count: batch, phase.last: batch}
        case KeptDeltaRulePhase():
            return {phase.positions: rows, phase.kept: batch}
        case RowsAttentionPhase():
            return {phase.positions: rows, phase.first: rows}
        case SelectorWalkPhase() | MarkovWalkPhase():
            return {phase.tokens: rows, phase.output: rows}
        case CutDraftsPhase():
            return {phase.positions: rows, phase.output: rows}
    return {}


def _check_scalars(program: Program, phase: Phase, report: Report) -> None:
    sizes = {one.name: one.size for one in program.scalars}
    for name, wanted in scalar_sizes(program, phase).items():
        if sizes[name] < wanted:
            report("V804", phase.id, f"{name} has {sizes[name]} scalars, the phase uses {wanted}")
    if isinstance(phase, AcceptPhase) and program.round is not None:
        told = program.round.emitted, program.round.count
        if told != (phase.emitted, phase.count):
            message = f"{phase.emitted} and {phase.count} are accepted, the round reports {told}"
            report("V504", phase.id, message)


def _check_operands(program: Program, report: Report) -> None:
    names = Counter(one.name for one in program.operands)
    for name in (one for one, count in names.items() if count > 1):
        report("V805", name, f"there are {names[name]} operands {name!r}")
    scalars = {one.name for one in program.operands if one.role in SCALAR_ROLES}
    for name in ("tokens", "positions"):
        if name not in scalars:
            report("V805", name, f"there is no operand {name!r} among the scalars")
    for phase in program.phases():
        plain = isinstance(phase, EmbedPhase) and program.round is None
        if isinstance(phase, EmbedPhase) and plain and phase.source not in scalars:
            report("V805", phase.id, f"there is no operand {phase.source!r} among the scalars")


def _check_pages(program: Program, report: Report) -> None:
    """Small vectors of a page lie side by side."""
    for name, vectors in program.pages.items():
        taken: Counter[int] = Counter()
        for one in vectors:
            taken.update(range(one.row, one.row - (-one.length // VECTOR_LANES)))
        shared = sorted(row for row, count in taken.items() if count > 1)
        if shared:
            report("V804", name, f"row {shared[0]} of an item belongs to two vectors")


def _check_taps(program: Program, report: Report) -> None:
    """What layers show is stored by the phases that are made for it, and by no other."""
    taps = {one.buffer for one in program.phases() if isinstance(one, TapPhase)}
    for phase in program.phases():
        outputs = getattr(phase, "outputs", None) or (getattr(phase, "output", None),)
        if isinstance(phase, VectorPhase):
            outputs = tuple(phase.writes.values())
        for view in outputs:
            if isinstance(view, View) and view.buffer in taps:
                report("V506", phase.id, f"a result is stored in {view.buffer}, among the taps")


def _check_rings(program: Program, report: Report) -> bool:
    empty = [one.name for one in program.streams if one.slots < 1]
    empty += [one.name for one in program.caches if one.slots < 1]
    empty += ["tape"] if program.tape.slots < 1 else []
    for name in empty:
        report("V804", name, "a ring without slots")
    attended = {getattr(one, "cache", None) for one in program.phases()}
    idle = [one.name for one in program.caches if one.name not in attended]
    for name in idle:
        report("V501", name, "no phase attends to it")
    return not empty and not idle


def _check_refills(phase: Phase, report: Report) -> bool:
    if not isinstance(phase, MatmulPhase):
        return True
    if phase.blocks_per_step < 1 or phase.loads_per_step < 1:
        report("V503", phase.id, "a step without loads")
        return False
    if not all(guards for run in phase.runs for guards in run.refill):
        report("V502", phase.id, "a refill without any case")
        return False
    return True


def _check_turns(program: Program, phase: MarkovWalkPhase, report: Report) -> None:
    """Rows of a walk exchange a value and an id for each sequence."""
    plans = {one.name: one for one in program.exchanges}
    for plan in (plans[name] for name in phase.exchanges):
        sent = (2 * -(-program.batch // VECTOR_ROWS) * VECTOR_ROWS, VECTOR_LANES)
        if (plan.rows, plan.columns) != sent or plan.kind != "argmax":
            message = f"{plan.name} is made for {plan.kind} of {plan.rows} rows, the phase sends"
            report("V804", phase.id, f"{message} {sent[0]}")


def _check_exchange(program: Program, phase: Phase, report: Report) -> bool:
    """The buffers of an exchange are those of its algorithm, and as large as what it sends."""
    plans = {one.name: one for one in program.exchanges}
    scattered, group = 0, 0
    match phase:
        case MarkovWalkPhase():
            _check_turns(program, phase, report)
            return True
        case AllReducePhase():
            name, kind, lanes = phase.exchange, phase.algorithm, phase.partial.width
            scattered, group = phase.scattered, phase.group
        case AllGatherPhase():
            name, kind = phase.exchange, phase.algorithm
            lanes = sum(one.width for one in phase.parts)
        case ArgmaxPhase() | AcceptPhase() | TopKPhase() if phase.exchange is not None:
            name, lanes = phase.exchange, VECTOR_LANES
            kind = "top_k" if isinstance(phase, TopKPhase) else "argmax"
        case _:
            return True
    plan = plans[name]
    if plan.kind != kind:
        report("V805", phase.id, f"{name} is made for {plan.kind}, the phase does {kind}")
        return False
    one_row = program.rows == 1 and kind in ("one_shot", "two_level", "two_step", "gather_f32")
    least = 1 if one_row else program.padded_rows
    lanes = -(-lanes // VECTOR_LANES) * VECTOR_LANES
    if kind == "two_phase":
        lanes = scattered_columns(lanes, program.ranks)
    if kind == "two_level":
        lanes = scattered_columns(lanes - scattered, plan.group) + scattered
    if plan.scattered != scattered or (scattered and plan.group not in (0, group)):
        message = f"{name} scatters {plan.scattered} columns in groups of {plan.group}"
        report("V805", phase.id, f"{message}; the phase {scattered} in groups of {group}")
        return False
    if plan.columns != lanes or plan.rows < least:
        message = f"{name} has {plan.rows} rows and {plan.columns} lanes"
        report("V804", phase.id, f"{message}; the phase sends {least} and {lanes}")
    return True
