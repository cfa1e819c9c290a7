"""What the generated kernel says about a phase: its op, its bytes, its ring slots, its time."""

from __future__ import annotations

import textwrap

from mkc.schedule.messages import exchange_us
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.targets import Target

WIDTH = 92
ROW_BYTES = TAPE_LANES * 2


def phase_notes(program: Program, phase: Phase, target: Target) -> list[str]:
    """The lines of a phase's docstring. Times are predicted from the target's figures."""
    lines = textwrap.wrap(f"{phase.id}: {phase.title}.", WIDTH)
    if phase.location is not None:
        lines += [f"From {phase.location}."]
    facts = _facts(program, phase, target)
    return [*lines, "", *facts] if facts else lines


def _facts(program: Program, phase: Phase, target: Target) -> list[str]:
    match phase:
        case MatmulPhase():
            return _matmul(program, phase, target)
        case NarrowMatmulPhase():
            return [
                f"[{program.rows}, {phase.K}] x [{phase.K}, {phase.columns}], weights as rows "
                f"from {phase.stream}.",
                _flow(phase.left, phase.output),
            ]
        case AllReducePhase():
            return _all_reduce(program, phase, target)
        case DeltaRulePhase():
            state = phase.value_heads * phase.key_dim * phase.value_dim * 4
            return [
                f"{phase.key_heads} key and {phase.value_heads} value heads; {state} bytes of "
                f"state per sequence, in place in {phase.stream}.",
            ]
        case AttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            return [
                f"{phase.heads} query and {phase.kv_heads} key heads of {phase.head_dim}; tiles of "
                f"{cache.tile} positions, {cache.slots} slots.",
            ]
        case VectorPhase():
            return _vector(phase)
        case KeptDeltaRulePhase():
            return _kept_delta_rule(phase)
        case RowsAttentionPhase():
            return _rows_attention(program, phase)
        case AllGatherPhase():
            flows = [_flow(*pair) for pair in zip(phase.parts, phase.outputs, strict=True)]
            return _exchange(program, phase.exchange, target) + flows
        case TapPhase():
            read = len(set(phase.places)) - 1
            return [
                f"{len(phase.places)} executions, {read} of them are read.",
                f"Reads {phase.source.buffer}, writes {phase.buffer}.",
            ]
        case AcceptPhase() | TopKPhase():
            return _exchange(program, phase.exchange, target) if phase.exchange else []
        case _:
            return []


def _matmul(program: Program, phase: MatmulPhase, target: Target) -> list[str]:
    loads = phase.loads()
    count = "1 load" if len(loads) == 1 else f"{len(loads)} loads"
    total = sum(loads) * ROW_BYTES
    stream_us = total / target.hbm.sustained_bytes_per_us
    pushes = phase.K * phase.blocks / target.mxu.width
    push_us = pushes * target.mxu.push_us * (target.mxu.width / TAPE_LANES)
    rows = str(program.rows)
    if phase.also:
        rows = f"{1 + len(phase.also)} x {rows}"
    return [
        f"[{rows}, {phase.K}] x [{phase.K}, {phase.columns}]: {count} of "
        f"{loads[0]} rows, {total} bytes, slots of {program.tape.slot_rows} rows.",
        f"Predicted: {stream_us:.2f} us of weight stream, {push_us:.2f} us of matrix unit.",
        _flow(phase.left, phase.output),
        *(_flow(one.left, one.output) for one in phase.also),
    ]


def _all_reduce(program: Program, phase: AllReducePhase, target: Target) -> list[str]:
    plan = next(one for one in program.exchanges if one.name == phase.exchange)
    predicted = exchange_us(plan, program.ranks, target)
    return [
        f"{phase.algorithm} over {program.ranks} ranks, [{plan.rows}, {plan.columns}].",
        f"Predicted: {predicted:.2f} us.",
        *textwrap.wrap(f"Safe because {plan.safe_because}.", WIDTH),
        _flow(phase.partial, phase.output),
    ]


def _exchange(program: Program, exchange: str, target: Target) -> list[str]:
    """Of an exchange with one message to each peer."""
    plan = next(one for one in program.exchanges if one.name == exchange)
    predicted = exchange_us(plan, program.ranks, target)
    return [
        f"{plan.kind} over {program.ranks} ranks, [{plan.rows}, {plan.columns}].",
        f"Predicted: {predicted:.2f} us.",
        *textwrap.wrap(f"Safe because {plan.safe_because}.", WIDTH),
    ]


def _kept_delta_rule(phase: KeptDeltaRulePhase) -> list[str]:
    state = phase.value_heads * phase.key_dim * phase.value_dim * 4
    kept = f"{phase.kept_k}, {phase.kept_u} and {phase.kept_decay}"
    return [
        f"{phase.key_heads} key and {phase.value_heads} value heads; {state} bytes of state per "
        f"sequence,",
        f"in place in {phase.state}; kept rows in {kept}.",
    ]


def _rows_attention(program: Program, phase: RowsAttentionPhase) -> list[str]:
    cache = next(one for one in program.caches if one.name == phase.cache)
    seen = "" if phase.window is None else f", keys nearer than {phase.window}"
    seen += " to the block" if seen and phase.anchored else ""
    return [
        f"{phase.heads} query and {phase.kv_heads} key heads of {phase.head_dim}; tiles of "
        f"{cache.tile} positions, {cache.slots} slots{seen}."
    ]


def _vector(phase: VectorPhase) -> list[str]:
    lines = []
    if phase.reads:
        lines += textwrap.wrap("Reads " + ", ".join(_names(phase.reads)) + ".", WIDTH)
    if phase.writes:
        lines += textwrap.wrap("Writes " + ", ".join(_names(phase.writes)) + ".", WIDTH)
    return lines


def _names(views: dict[str, View]) -> list[str]:
    return list(dict.fromkeys(view.buffer for view in views.values()))


def _flow(source: View, output: View) -> str:
    return f"Reads {source.buffer}, writes {output.buffer}."
