"""`report.json` and `plan.json`: what was compiled, in numbers, and everything that was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from mkc.codegen_pallas.aot import AotResult
from mkc.ir.ops import Op
from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Operand
from mkc.schedule.program import Program
from mkc.targets import Target

PLAN_VERSION = 1  # of the form of plan.json; a reader refuses another one
WEIGHT_ROLES = ("tape", "page", "narrow")
LARGEST_LISTED = 8


def operand_bytes(operand: Operand) -> int:
    """Bytes of one rank's part."""
    count = 1
    for size in operand.shape:
        count *= size
    return count * operand.dtype.bytes


def rank_bytes(program: Program) -> tuple[int, int]:
    """HBM bytes of one rank: weights with embedding tables, and states with caches."""
    weights = sum(
        operand_bytes(one) for one in program.operands if one.role in (*WEIGHT_ROLES, "table")
    )
    states = sum(operand_bytes(one) for one in program.operands if one.updated)
    return weights, states


def stream_bytes(lowered: Lowered) -> dict[str, int]:
    """Bytes one rank moves per step.

    `tape`: all weights, small vectors included. `padding`: what of it the checkpoint does not have.
    `kv`: caches read up to a full context. `state`: recurrent and convolution states, both ways.
    """
    program = lowered.program
    sharded = lowered.steps.sharded
    tables = {
        node.operands[1] for node in sharded.graph.body.nodes() if node.op.mnemonic == "embed"
    }
    readers = {
        name
        for node in sharded.graph.body.nodes()
        if node.op.mnemonic != "embed"
        for name in node.operands
    }
    tape = sum(operand_bytes(one) for one in program.operands if one.role in WEIGHT_ROLES)
    useful = sum(
        param.type.bytes * param.instances
        for key, param in sharded.graph.params.items()
        if key not in tables or key in readers
    )
    cache = sum(operand_bytes(one) for one in program.operands if one.role == "cache")
    state = sum(operand_bytes(one) for one in program.operands if one.role == "state")
    return {"tape": tape, "padding": tape - useful, "kv": cache, "state": 2 * state}


def report_document(
    lowered: Lowered, target: Target, aot: AotResult | None, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The contents of report.json."""
    program = lowered.program
    allocations = lowered.residency.allocations
    return {
        "model": program.name,
        "scheme": program.scheme,
        "target": target.name,
        "ranks": program.ranks,
        "batch": program.batch,
        "rows": program.rows,
        "context": program.context,
        "launches": 1,
        "rounds_per_launch": program.rounds_per_launch,
        "bytes": stream_bytes(lowered),
        "floor_us": floor_us(lowered, target),
        "vmem": {
            "peak_bytes": lowered.residency.vmem_bytes,
            "limit_bytes": target.vmem.usable_bytes,
            "reserve_bytes": lowered.residency.reserve_bytes,
            "largest": [[one.name, one.bytes] for one in allocations[:LARGEST_LISTED]],
        },
        "aot": _aot_document(aot),
        "decisions": len(lowered.log.decisions),
        "predicted": None,
        "timing": {key: round(value, 3) for key, value in seconds.items()},
    }


def floor_us(lowered: Lowered, target: Target) -> float:
    """Predicted least time of a step: its weight and state bytes at the sustained rate."""
    moved = stream_bytes(lowered)
    return round((moved["tape"] + moved["state"]) / target.hbm.sustained_bytes_per_us, 1)


def _aot_document(aot: AotResult | None) -> dict[str, Any] | None:
    if aot is None:
        return None
    document = asdict(aot)
    document["seconds"] = round(aot.seconds, 3)
    document["other_ops"] = list(aot.other_ops)
    return document


def plan_document(lowered: Lowered, target: Target) -> dict[str, Any]:
    """The contents of plan.json: the program, its places in memory and every decision."""
    return {
        "version": PLAN_VERSION,
        "target": target.name,
        "pipeline": lowered.pipeline,
        "program": _plain(lowered.program),
        "sharding": {
            "params": _plain(lowered.steps.sharded.params),
            "states": _plain(lowered.steps.sharded.states),
        },
        "allocations": _plain(lowered.residency.allocations),
        "decisions": _plain(lowered.log.decisions),
    }


def _plain(value: Any) -> Any:
    """Dataclasses as objects with their kind, enumerations as text: what JSON can hold."""
    if isinstance(value, Op):
        return {"op": value.mnemonic, **_members(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **_members(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _members(record: Any) -> dict[str, Any]:
    return {part.name: _plain(getattr(record, part.name)) for part in fields(record)}
