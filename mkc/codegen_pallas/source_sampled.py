"""What a kernel of rounds that sample has around its rounds; see `source`."""

from __future__ import annotations

from mkc.schedule.program import Program
from mkc.schedule.scalars import RoundPlan


def begin_lines(plan: RoundPlan) -> list[str]:
    """When the launch begins."""
    return [f"support.begin_sampled_rounds(m, {_pairs(plan)})"] if plan.forced else []


def end_round_lines(plan: RoundPlan) -> list[str]:
    """Before a round moves on."""
    if not plan.forced:
        return []
    views = (
        f"support.View(ref=m.{one.source.buffer}, start={one.source.start}, "
        f"width={one.source.width})"
        for one in plan.rows
    )
    return [
        "support.end_sampled_round(",
        "    m,",
        "    (",
        *[f"        (m.{row.array}, {view})," for row, view in zip(plan.rows, views, strict=True)],
        "    ),",
        f"    count=m.{plan.count},",
        "    batch=BATCH,",
        "    rows_per_sequence=ROWS_PER_SEQUENCE,",
        ")",
    ]


def end_lines(plan: RoundPlan) -> list[str]:
    """When the launch ends."""
    return [f"support.end_sampled_rounds(m, {_pairs(plan)})"] if plan.forced else []


def sampling_scratch(program: Program, plan: RoundPlan) -> list[tuple[str, str, tuple[int, ...]]]:
    """As `source.scratch`."""
    if not plan.forced:
        return []
    operands = {one.name: one for one in program.operands}
    rows = [(one.array, operands[one.target]) for one in plan.rows]
    return [
        (plan.forced, "scalars", (program.rows,)),
        *((name, operand.dtype.value, operand.shape) for name, operand in rows),
        ("rows_sem", "dma", (1,)),
    ]


def _pairs(plan: RoundPlan) -> str:
    """Arrays of carried rows in HBM and in VMEM."""
    return f"({''.join(f'(m.{one.target}_out, m.{one.array}), ' for one in plan.rows)})"
