"""Costs and copies of mixtures of experts; see `costs` and `translate`.

How many experts a step reads depends on data. What is priced is an assumed routing, on the rank
that reads most; unless another one is asked for, it is uniform and independent between rows.
"""

from __future__ import annotations

from math import ceil

from mkc.ir.routing import Routing
from mkc.ir.routing import mean_fullest
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.program import Program
from mkc.schedule.simulate.cost_parts import elements_us
from mkc.targets import Target

ROUTE_CHAINS = 5  # dependent steps: ranks, places, weights, the list, its way to scalar memory


def plan_and_ring(program: Program, name: str) -> tuple[ExpertPlan, ExpertRing]:
    """Of a mixture."""
    plan = next(one for one in program.experts if one.name == name)
    return plan, next(one for one in program.expert_rings if one.name == plan.ring)


def experts_read(program: Program, name: str, routing: Routing = Routing.UNIFORM) -> int:
    """Experts that a layer reads, on the rank that reads most."""
    plan, ring = plan_and_ring(program, name)
    return round(mean_fullest(ring.experts, ring.chosen, ring.rows, plan.groups, routing))


def expert_us(program: Program, phase: ExpertsPhase, target: Target) -> float:
    """Core time of one expert: its weights are pushed once for all rows."""
    _, ring = plan_and_ring(program, phase.experts)
    return ring.slice.pushed / target.mxu.width**2 * target.mxu.push_us


def route_us(program: Program, phase: RoutePhase, target: Target) -> float:
    """Every score is compared with every other one of its row."""
    _, ring = plan_and_ring(program, phase.experts)
    compared = ring.rows * ring.experts * ceil(ring.experts / target.core.lanes)
    compared *= target.core.lanes
    listed = (phase.k + 2) * ring.padded_rows * ring.experts
    return elements_us(2 * compared + listed, target) + ROUTE_CHAINS * target.core.vector_chain_us
