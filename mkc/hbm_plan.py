"""What one device's memory will hold when a model is served, before anything is loaded.

Arrays are counted with their memory tiles. The workspace of prefill is what the TPU compiler says
where a program has been compiled; otherwise it is computed from the graph, as if all values of one
block were alive at once, which is more than any schedule needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mkc.errors import HbmPart
from mkc.errors import HbmPlanError
from mkc.ir import ops
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.ir.infer_experts import expert_matrices
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.types import DType
from mkc.passes.expert_places import MATRICES
from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Operand
from mkc.schedule.program import Program
from mkc.targets import Target

SHAPES = "from its shapes"
COMPUTED = "computed from the graph"
COMPILED = "from the TPU compiler"
GIB, MIB = 1 << 30, 1 << 20
F32_BYTES = 4
ATTENTION_COLUMNS = 512  # positions whose scores prefill holds at once
SCORES = 3  # arrays of that size: scores, weights, and one of them rounded


@dataclass(frozen=True, kw_only=True)
class HbmPlan:
    """Attributes:
    target: name of the target.
    limit_bytes: what a program may use of one device.
    parts: everything that is there at once, in the order of loading.
    """

    target: str
    limit_bytes: int
    parts: tuple[HbmPart, ...]

    @property
    def total_bytes(self) -> int:
        return sum(one.bytes for one in self.parts)

    def check(self) -> None:
        """Raises `HbmPlanError` when the device is too small."""
        if self.total_bytes > self.limit_bytes:
            raise HbmPlanError(target=self.target, limit_bytes=self.limit_bytes, parts=self.parts)

    def __str__(self) -> str:
        """One line: each part, the sum, and what the device has."""
        parts = ", ".join(
            f"{one.name} {size_text(one.bytes)}{' (computed)' * (one.origin == COMPUTED)}"
            for one in self.parts
            if one.bytes
        )
        return (
            f"memory of each device of {self.target}: {parts}; together "
            f"{size_text(self.total_bytes)} of {size_text(self.limit_bytes)}"
        )


def size_text(count: int) -> str:
    """Bytes in the unit that suits them."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB // 10 else f"{count / 1024:.1f} KiB"


def hbm_plan(
    lowered: Lowered,
    target: Target,
    *,
    prefill_rows: int,
    prefill_bytes: int | None = None,
    kernel_bytes: int | None = None,
    prompts: Graph | None = None,
) -> HbmPlan:
    """Plans one device.

    Args:
      prefill_rows: of the largest prefill program.
      prefill_bytes: what that program needs besides weights and states, if a compiler has said it.
      kernel_bytes: the same of the kernel, whose logits and masks may be in it.
      prompts: graph of one rank that reads prompts, None for the kernel's own.
    """
    program = lowered.program

    def operands(*roles: str) -> int:
        return sum(_padded(one, target) for one in program.operands if one.role in roles)

    held = {"tape", "page", "narrow", "matrix", "experts", "table", "state", "cache"}
    inputs = {one.role for one in program.operands} - held
    computed = prefill_workspace(prompts or lowered.steps.sharded.graph, prefill_rows)
    parts = (
        ("weight tape", operands("tape"), SHAPES),
        ("other weights", operands("page", "narrow", "matrix", "experts", "table"), SHAPES),
        ("recurrent states", operands("state"), SHAPES),
        ("key-value caches", operands("cache"), SHAPES),
        ("logits", _logits_bytes(program), SHAPES),
        ("inputs and tokens", operands(*inputs) + _emitted_bytes(program), SHAPES),
        ("kernel workspace", kernel_bytes or 0, COMPILED),
        (
            "prefill workspace",
            computed if prefill_bytes is None else prefill_bytes,
            COMPUTED if prefill_bytes is None else COMPILED,
        ),
        ("one saved slot", saved_slot_bytes(lowered, prefill_rows), SHAPES),
    )
    return HbmPlan(
        target=target.name,
        limit_bytes=target.hbm.usable_bytes,
        parts=tuple(HbmPart(name=name, bytes=size, origin=origin) for name, size, origin in parts),
    )


def prefill_workspace(graph: Graph, rows: int) -> int:
    """Bytes of all values of the largest block for `rows` tokens, in f32, and scores of attention.

    Args:
      graph: of one rank.
    """
    outputs = set(graph.outputs.values())  # of the last row only

    def of(block: Block) -> int:
        own = inner = 0
        for item in block.items:
            if isinstance(item, Node):
                own += _value_bytes(item, graph.rows, rows, outputs) + _expert_bytes(item, graph)
            else:
                inner = max(inner, of(item.body))
        return own + inner

    return of(graph.body)


def _value_bytes(node: Node, graph_rows: int, rows: int, outputs: set[str]) -> int:
    """Results of a node for `rows` tokens."""
    values = (one for one in node.results if one.name not in outputs)
    lanes = sum(prod(one.type.shape) // graph_rows for one in values if one.type.rank > 1)
    if isinstance(node.op, ops.Attention | LatentAttention):
        heads = node.results[0].type.shape[1]
        lanes += SCORES * heads * ATTENTION_COLUMNS
    return lanes * rows * F32_BYTES


def _expert_bytes(node: Node, graph: Graph) -> int:
    """The matrices of one expert in f32: prefill takes one after the other."""
    if not isinstance(node.op, ExpertMlp):
        return 0
    types = tuple(graph.params[key].type for key in node.operands[MATRICES:])
    return sum(prod(shape[1:]) for shape in expert_matrices(node.op, types)) * F32_BYTES


def saved_slot_bytes(lowered: Lowered, rows: int) -> int:
    """What one slot remembers, with `rows` positions, on its way to the host or back.

    The prefix cache keeps it on the host. Kept rows are committed before, and not saved.
    """
    program = lowered.program
    kept = _kept_rows(lowered)
    found = 0
    for one in program.operands:
        size = prod(one.shape) * one.dtype.bytes
        if one.role == "cache":
            found += size * min(rows, program.context) // (program.batch * program.context)
        elif one.role == "state" and one.name not in kept:
            found += size // program.batch
    return found


def _kept_rows(lowered: Lowered) -> set[str]:
    """Operands of rows that a round keeps for the next one."""
    states = lowered.steps.sharded.full.states
    streams = lowered.residency.streams.state_of
    names = {streams[key] for key, one in states.items() if one.kind is StateKind.KEPT}
    return {one.array for one in lowered.program.streams if one.name in names}


def _padded(operand: Operand, target: Target) -> int:
    return target.padded_bytes(operand.shape, operand.dtype.bytes)


def _logits_bytes(program: Program) -> int:
    if program.logits is None:
        return 0
    buffer = next(one for one in program.buffers if one.name == program.logits.buffer)
    return prod(buffer.shape) * F32_BYTES


def _emitted_bytes(program: Program) -> int:
    return program.rounds_per_launch * program.rows * DType.I32.bytes
