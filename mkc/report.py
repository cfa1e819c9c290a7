"""`report.json` and `plan.json`: what was compiled, in numbers, and everything that was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mkc.codegen_pallas.aot import AotResult
from mkc.hbm_plan import hbm_plan
from mkc.ir.graph import Graph
from mkc.ir.types import DType
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Lowered
from mkc.plan.form import DIGEST
from mkc.plan.form import OF_PLAN
from mkc.plan.form import PLAN_VERSION
from mkc.plan.form import digest
from mkc.plan.form import plain
from mkc.prompt_blocks import block_sizes
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Operand
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.simulate import PhaseCycles
from mkc.schedule.simulate import Prediction
from mkc.schedule.simulate.costs_experts import experts_read
from mkc.schedule.verify import Proof
from mkc.targets import Target

WEIGHT_ROLES = ("tape", "page", "narrow", "matrix")
LARGEST_LISTED = 8
PARTIAL_SUMS = "partial sums travel between ranks as bf16"


def rounding(program: Program) -> list[str]:
    """What the kernel rounds that the graph does not; nothing unless it was asked for."""
    wires = {one.wire for one in program.exchanges}
    return [PARTIAL_SUMS] if DType.BF16 in wires else []


def operand_bytes(operand: Operand) -> int:
    """Bytes of one rank's part."""
    count = 1
    for size in operand.shape:
        count *= size
    return count * operand.dtype.bytes


def rank_bytes(program: Program) -> tuple[int, int]:
    """HBM bytes of one rank: weights with embedding tables, and states with caches."""
    held = (*WEIGHT_ROLES, "experts", "table")
    weights = sum(operand_bytes(one) for one in program.operands if one.role in held)
    states = sum(operand_bytes(one) for one in program.operands if one.updated)
    return weights, states


def stream_bytes(lowered: Lowered) -> dict[str, int]:
    """Bytes one rank moves per step.

    `tape`: all weights but experts, small vectors included. `padding`: what of it the checkpoint
    does not have. `experts`: those that a step chooses, with their own padding, on the rank that
    reads most, routing uniform and independent between rows. `draft`: of the tape, what comes
    behind the acceptance of a round, for the next drafts. `kv`: caches read up to a full context.
    `state`: recurrent and convolution states, both ways.
    """
    program = lowered.program
    sharded = lowered.steps.sharded
    elsewhere = {one.param for one in program.operands if one.role == "table"}
    elsewhere.update(key for one in program.experts for key in one.params)
    tape = sum(operand_bytes(one) for one in program.operands if one.role in WEIGHT_ROLES)
    useful = sum(
        param.type.bytes * param.instances
        for key, param in sharded.graph.params.items()
        if key not in elsewhere
    )
    # Weights that lie on the tape twice are read twice.
    again = [sharded.graph.params[key] for key in _read_again(program)]
    useful += sum(param.type.bytes * param.instances for param in again)
    cache = sum(operand_bytes(one) for one in program.operands if one.role == "cache")
    state = sum(operand_bytes(one) for one in program.operands if one.role == "state")
    return {
        "tape": tape,
        "padding": tape - useful,
        "experts": expert_bytes(program),
        "draft": draft_bytes(program),
        "kv": cache,
        "state": 2 * state,
    }


def expert_bytes(program: Program) -> int:
    """Of the experts that a step chooses; see `experts_read`. 0 without any."""
    rings = {one.name: one for one in program.expert_rings}
    return sum(
        one.layers * experts_read(program, one.name) * rings[one.ring].slice.bytes
        for one in program.experts
    )


def draft_bytes(program: Program) -> int:
    """Tape bytes behind the acceptance of a round; 0 where nothing is accepted."""
    rows, accepted = 0, False

    def visit(body: tuple[Phase | Loop, ...], executions: int) -> None:
        nonlocal rows, accepted
        for item in body:
            if isinstance(item, Loop):
                visit(item.body, executions * item.count)
            elif isinstance(item, MatmulPhase) and accepted:
                rows += executions * item.tape_rows
            accepted = accepted or isinstance(item, AcceptPhase)

    visit(program.body, 1)
    return rows * TAPE_LANES * DType.BF16.bytes


def _read_again(program: Program) -> list[str]:
    """Parameters of matmuls that have been read by an earlier one."""
    pieces = [
        piece.param
        for phase in program.phases()
        if isinstance(phase, MatmulPhase | NarrowMatmulPhase)
        for piece in phase.pieces
    ]
    return [key for number, key in enumerate(pieces) if key in pieces[:number]]


def report_document(
    lowered: Lowered,
    target: Target,
    aot: AotResult | None,
    seconds: Mapping[str, float],
    *,
    predicted: Prediction,
    alike: Prediction | None = None,
    proof: Proof,
    plan: Mapping[str, Any],
    prompts: Graph | None = None,
) -> dict[str, Any]:
    """The contents of report.json.

    Args:
      alike: where rows choose experts, the prediction for rows that all choose the same ones.
      plan: the contents of the plan.json beside it.
      prompts: graph that reads prompts, None for the kernel's own.
    """
    program = lowered.program
    allocations = lowered.residency.allocations
    document = {
        "model": program.name,
        "scheme": program.scheme,
        "target": target.name,
        "ranks": program.ranks,
        "batch": program.batch,
        "rows": program.rows,
        "context": program.context,
        "launches": 1,
        "rounds_per_launch": program.rounds_per_launch,
        "rounding": rounding(program),
        "bytes": stream_bytes(lowered),
        "floor_us": floor_us(lowered, target),
        "vmem": {
            "peak_bytes": lowered.residency.vmem_bytes,
            "limit_bytes": target.vmem.usable_bytes,
            "reserve_bytes": lowered.residency.reserve_bytes,
            "largest": [[one.name, one.bytes] for one in allocations[:LARGEST_LISTED]],
        },
        "hbm": _hbm_document(lowered, target, aot, prompts),
        "aot": _aot_document(aot),
        "decisions": len(lowered.log.decisions),
        "predicted": predicted.document(),
        "predicted_alike": alike.document() if alike is not None else None,
        "proof": {"ok": proof.ok, "checks": proof.checks()},
        "timing": {key: round(value, 3) for key, value in seconds.items()},
        OF_PLAN: plan[DIGEST],
    }
    return {**document, DIGEST: digest(document)}


def _hbm_document(
    lowered: Lowered, target: Target, aot: AotResult | None, prompts: Graph | None
) -> dict[str, Any]:
    """What a device holds when the kernel is served; see `mkc.hbm_plan`."""
    if prompts is not None:
        shard = Shard(ranks=lowered.program.ranks)
        prompts = shard.apply(prompts, DecisionLog(), like=lowered.steps.sharded).graph
    plan = hbm_plan(
        lowered,
        target,
        prefill_rows=block_sizes(lowered.program.context)[-1],
        kernel_bytes=aot.temporary_bytes if aot is not None else None,
        prompts=prompts,
    )
    return {
        "total_bytes": plan.total_bytes,
        "limit_bytes": plan.limit_bytes,
        "parts": [asdict(one) for one in plan.parts],
    }


def floor_us(lowered: Lowered, target: Target) -> float:
    """Predicted least time of a step: its weight and state bytes at the sustained rate."""
    moved = stream_bytes(lowered)
    total = moved["tape"] + moved["experts"] + moved["state"]
    return round(total / target.hbm.sustained_bytes_per_us, 1)


def _aot_document(aot: AotResult | None) -> dict[str, Any] | None:
    if aot is None:
        return None
    document = asdict(aot)
    document["seconds"] = round(aot.seconds, 3)
    document["other_ops"] = list(aot.other_ops)
    return document


def plan_document(
    lowered: Lowered, target: Target, *, cycles: Mapping[str, PhaseCycles]
) -> dict[str, Any]:
    """The contents of plan.json: the program, its places in memory and every decision.

    Args:
      cycles: machine code of the phases, by id; empty where none was looked at.
    """
    document = {
        "version": PLAN_VERSION,
        "target": target.name,
        "pipeline": lowered.pipeline,
        "program": plain(lowered.program),
        "sharding": {
            "params": plain(lowered.steps.sharded.params),
            "states": plain(lowered.steps.sharded.states),
        },
        "allocations": plain(lowered.residency.allocations),
        "decisions": plain(lowered.log.decisions),
        "cycles": plain(cycles),
    }
    return {**document, DIGEST: digest(document)}
