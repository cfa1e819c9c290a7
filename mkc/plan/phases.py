"""What pictures and explanations know about a phase: one row per phase, under its stable id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields
from math import prod

from mkc.plan.folder import PlanFolder
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Product
from mkc.schedule.program import Program
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.program import phases_of
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import Remembered
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.simulate.costs_experts import experts_read
from mkc.schedule.simulate.costs_experts import plan_and_ring

ROW_BYTES = TAPE_LANES * 2
BF16_BYTES = 2
VERIFY, DRAFT = "verify", "draft"
STEP_ID = re.compile(r"p\d+")


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One phase.

    Attributes:
      id: the stable id of source, plan and pictures.
      kind: such as `matmul`.
      title: what it does.
      location: the author's line, empty when there is none.
      kernel_line: line of kernel.py that defines it, 0 when it is not found there.
      loops: names of the loops around it, outermost first.
      executions: per step.
      bytes: of HBM that one execution uses: tape, stream item, or cache at a full context.
      flops: of matrix and recurrent work in one execution; 0 when only vector work is done.
      reads, writes: buffers.
      position: in program order.
      part: of a round of a scheme: `verify` up to the acceptance, `draft` behind it; else empty.
    """

    id: str
    kind: str
    title: str
    location: str
    kernel_line: int
    loops: tuple[str, ...]
    executions: int
    bytes: int
    flops: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    position: int
    part: str

    @property
    def is_step(self) -> bool:
        """False for bookkeeping between steps, such as the wait for a stream's item."""
        return STEP_ID.fullmatch(self.id) is not None


def phase_rows(folder: PlanFolder) -> tuple[PhaseRow, ...]:
    """All phases in program order, loop bodies once."""
    program = folder.program
    lines = kernel_lines(folder.kernel_source)
    parts = _parts(program)
    return tuple(
        PhaseRow(
            id=phase.id,
            kind=phase_kind(phase),
            title=phase.title,
            location=str(phase.location or ""),
            kernel_line=lines.get(phase.id, 0),
            loops=tuple(loop.name for loop in loops),
            executions=prod(loop.count for loop in loops),
            bytes=_bytes(program, phase),
            flops=_flops(program, phase),
            reads=phase_buffers(phase, written=False),
            writes=phase_buffers(phase, written=True),
            position=position,
            part=parts.get(phase.id, ""),
        )
        for position, (phase, loops) in enumerate(_walk(program.body, ()))
    )


def _parts(program: Program) -> dict[str, str]:
    """Phase id -> part of the round; empty without one."""
    parts: dict[str, str] = {}
    if program.round is None:
        return parts
    now = VERIFY
    for phase in phases_of(program.body):
        parts[phase.id] = now
        if isinstance(phase, AcceptPhase):
            now = DRAFT
    return parts


def _walk(
    body: tuple[Phase | Loop, ...], loops: tuple[Loop, ...]
) -> Iterator[tuple[Phase, tuple[Loop, ...]]]:
    for item in body:
        if isinstance(item, Loop):
            yield from _walk(item.body, (*loops, item))
        else:
            yield item, loops


def phase_kind(phase: Phase) -> str:
    """`narrow matmul` for a `NarrowMatmulPhase`."""
    words = re.findall("[A-Z][a-z0-9]*", type(phase).__name__.removesuffix("Phase"))
    return " ".join(words).lower()


FUNCTION = re.compile(r"^def (p\d+)_")
INLINE = re.compile(r"support\.stream_(wait|advance)\(m\.(\w+), c\.\2\)")
STEP = re.compile(r"^def step\(")


def kernel_lines(source: str) -> dict[str, int]:
    """Phase id -> line of kernel.py, the first being 1. Also right for an edited file.

    Waits and advances of streams have no function; theirs are the lines of the step.
    """
    lines: dict[str, int] = {}
    inside = False
    for number, line in enumerate(source.splitlines(), start=1):
        if match := FUNCTION.match(line):
            lines.setdefault(match[1], number)
        inside = inside or STEP.match(line) is not None
        if inside and (match := INLINE.search(line)):
            lines.setdefault(f"{match[2]}_{match[1]}", number)
    return lines


WRITTEN = ("output", "outputs", "writes")  # fields of outputs


def phase_buffers(phase: Phase, *, written: bool) -> tuple[str, ...]:
    """Buffers of the fields that hold views."""
    names: list[str] = []
    for part in fields(phase):
        value = getattr(phase, part.name)
        if (part.name in WRITTEN) is written:
            views = value.values() if isinstance(value, dict) else (value,)
            names += [one.buffer for one in views if isinstance(one, View)]
        if isinstance(value, Remembered) and not written:
            names += [value.k.buffer, value.v.buffer]
        for one in value if isinstance(value, tuple) else ():
            if isinstance(one, Product):
                names.append((one.output if written else one.left).buffer)
            elif isinstance(one, View) and (part.name in WRITTEN) is written:
                names.append(one.buffer)
    if isinstance(phase, TapPhase) and written:
        names.append(phase.buffer)
    if isinstance(phase, TopKPhase):
        outputs = [phase.values.buffer, phase.ids.buffer]
        names = outputs if written else [one for one in names if one not in outputs]
    if isinstance(phase, RoutePhase):
        outputs = [phase.ids.buffer, phase.weights.buffer]
        names = outputs if written else [phase.logits.buffer]
    if isinstance(phase, ClearBlocksPhase | StoreBlockPhase) and written:
        names = [phase.blocks.buffer, phase.count.buffer]
        names += [phase.residual.buffer] if isinstance(phase, StoreBlockPhase) else []
    return tuple(dict.fromkeys(names))


def _bytes(program: Program, phase: Phase) -> int:
    match phase:
        case MatmulPhase():
            return phase.tape_rows * ROW_BYTES
        case EmbedPhase():
            return phase.output.width * BF16_BYTES * program.rows
        case NarrowMatmulPhase():
            return _item_bytes(program, phase.stream)
        case StreamWaitPhase():
            pages = {one.page for one in program.phases() if isinstance(one, VectorPhase)}
            return _item_bytes(program, phase.stream) if phase.stream in pages else 0
        case VectorPhase():
            return sum(_item_bytes(program, one) for one in phase.states.values())
        case DeltaRulePhase():
            return _item_bytes(program, phase.stream) * program.batch
        case KeptDeltaRulePhase():
            names = (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay)
            return sum(_item_bytes(program, one) for one in names) * program.batch
        case SelectorWalkPhase():
            return program.rows * (phase.k + 1) * phase.rank * BF16_BYTES
        case MarkovWalkPhase():
            return program.rows * phase.rank * BF16_BYTES
        case AttentionPhase() | RowsAttentionPhase() | LatentAttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            positions = min(cache.context, cache.window or cache.context)
            return cache.batch * positions * sum(cache.widths) * BF16_BYTES
        case ExpertsPhase():
            _, ring = plan_and_ring(program, phase.experts)
            return experts_read(program, phase.experts) * ring.slice.bytes
        case _:
            return 0


def _item_bytes(program: Program, stream: str) -> int:
    """Bytes that one item moves; twice its size when it goes back."""
    plan = next(one for one in program.streams if one.name == stream)
    return prod(plan.item_shape) * plan.dtype.bytes * (2 if plan.writes_back else 1)


def _flops(program: Program, phase: Phase) -> int:
    """Multiplications and additions, each counted once."""
    match phase:
        case MatmulPhase():
            return 2 * program.rows * phase.K * phase.columns * len(phase.lefts)
        case NarrowMatmulPhase():
            return 2 * program.rows * phase.K * phase.columns
        case AttentionPhase() | RowsAttentionPhase():
            cache = next(one for one in program.caches if one.name == phase.cache)
            seen = min(cache.context, cache.window or cache.context)
            return 4 * program.rows * phase.heads * phase.head_dim * seen
        case LatentAttentionPhase():
            # scores and sums over the context; queries folded, values projected
            rank = phase.latent.width
            context = program.context * (2 * rank + phase.shared_dim)
            folds = rank * (phase.key_dim + phase.value_dim)
            return 2 * program.rows * phase.heads * (context + folds)
        case ExpertsPhase():
            plan, ring = plan_and_ring(program, phase.experts)
            pairs = ring.rows * ring.chosen // plan.groups
            return 2 * pairs * 3 * ring.slice.width * ring.slice.inner
        case KeptDeltaRulePhase():
            # the commit, then what the state has for keys and queries of every row
            state = phase.value_heads * phase.key_dim * phase.value_dim
            return 6 * program.rows * state
        case DeltaRulePhase():
            # decay, read of the state, its update, and the query's read
            state = phase.value_heads * phase.key_dim * phase.value_dim
            return 7 * program.rows * state
        case _:
            return 0
