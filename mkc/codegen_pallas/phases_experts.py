"""The source of phases of mixtures of experts; see `phases`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkc.ir.types import DType
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.expert_store import CHOSEN_ROWS
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.program import Program

if TYPE_CHECKING:
    from mkc.codegen_pallas.phases import PhaseWriter


def route(writer: PhaseWriter, phase: RoutePhase) -> list[str]:
    plan, ring = _plan(writer.program, phase.experts)
    bias = "None"
    lines = []
    if phase.bias:
        row = next(one for one in writer.program.pages[phase.page] if one.param == phase.bias)
        page = f"m.{phase.page}.ring, c.{phase.page}.slot"
        bias = "bias"
        lines.append(f"bias = support.vector({page}, {row.row}, {row.length})")
    return [
        *lines,
        "support.route(",
        f"    {writer.view(phase.logits)},",
        f"    {bias},",
        f"    ids={writer.view(phase.ids)},",
        f"    weights={writer.view(phase.weights)},",
        f"    space={f'm.{ring.name}_scores' if ring.has_scores else None},",
        f"    landing=m.{ring.name}_landing,",
        f"    chosen=m.{ring.name}_chosen,",
        f"    sem=m.{ring.name}_sem.at[0],",
        f"    rows={ring.rows},",
        f"    k={phase.k},",
        f"    score=support.RouterScore.{phase.score.name},",
        f"    renormalise={phase.renormalise},",
        f"    factor={phase.factor!r},",
        f"    first={_first(plan)},",
        f"    local={plan.local},",
        ")",
        f"support.experts_start(m.{plan.name}, c.{plan.name})",
        "return c",
    ]


def experts(writer: PhaseWriter, phase: ExpertsPhase) -> list[str]:
    plan, ring = _plan(writer.program, phase.experts)
    output = writer.slice(phase.output)
    return [
        "support.expert_mlp(",
        f"    m.{plan.name},",
        f"    c.{plan.name},",
        f"    x={writer.view(phase.x)},",
        f"    ids={writer.view(phase.ids)},",
        f"    weights={writer.view(phase.weights)},",
        f"    out={writer.view(phase.output)},",
        f"    first={_first(plan)},",
        f"    rows={ring.rows},",
        f"    width={ring.slice.width},",
        f"    gate_cap={phase.gate_cap!r},",
        f"    up_cap={phase.up_cap!r},",
        ")",
        *([f"{output} = support.round_bf16({output})"] if phase.rounds else []),
        f"return c._replace({plan.name}=c.{plan.name} + 1)",
    ]


def memory_lines(program: Program) -> list[str]:
    """Names of the parts of the memory that experts pass through."""
    lines = []
    for plan in program.experts:
        _, ring = _plan(program, plan.name)
        left = f"m.{ring.name}_left" if ring.slice.dtype is DType.E2M1X2 else "None"
        lines += [
            f"    m.{plan.name} = support.ExpertStore(",
            f"        gate_up_hbm=m.{plan.gate_up_array},",
            f"        down_hbm=m.{plan.down_array},",
            f"        gate_up_ring=m.{ring.name}_gate_up,",
            f"        down_ring=m.{ring.name}_down,",
            f"        arrived=m.{ring.name}_arrived,",
            f"        chosen=m.{ring.name}_chosen,",
            f"        left={left},",
            f"        local={plan.local},",
            f"        slots={ring.slots},",
            "    )",
        ]
    return lines


def scratch_of(program: Program) -> list[tuple[str, str, tuple[int, ...]]]:
    """As `source.scratch`."""
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for ring in program.expert_rings:
        found += [(f"{ring.name}_{name}", kind.value, shape) for name, shape, kind in ring.arrays()]
        found += [
            (f"{ring.name}_chosen", "scalars", (CHOSEN_ROWS, ring.places)),
            (f"{ring.name}_arrived", "dma", (ring.slots,)),
            (f"{ring.name}_sem", "dma", (1,)),
        ]
    return found


def _plan(program: Program, name: str) -> tuple[ExpertPlan, ExpertRing]:
    plan = next(one for one in program.experts if one.name == name)
    return plan, next(one for one in program.expert_rings if one.name == plan.ring)


def _first(plan: ExpertPlan) -> str:
    """The first expert of this rank."""
    if plan.groups == 1:
        return "0"
    rank = 'lax.axis_index("tp")'
    group = rank if plan.slices == 1 else f"{rank} // {plan.slices}"
    return f"{group} * {plan.local}"
