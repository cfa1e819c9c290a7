"""Where experts lie: an HBM array for each mixture, a ring of slots for all that are alike."""

from __future__ import annotations

from math import ceil

from mkc.errors import UnsupportedGraphError
from mkc.ir.graph import Node
from mkc.ir.infer_experts import expert_matrices
from mkc.ir.ops_experts import Route
from mkc.passes.rank_ops import ShardedExpertMlp
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.expert_store import ExpertSlice
from mkc.targets import Target

FEWEST_SLOTS = 3  # two in use, because an expert is computed in two turns, and one arriving
MATRICES = 3  # operand of the experts at which their matrices begin


def place_experts(
    graph: StepGraph, padded_rows: int, target: Target
) -> tuple[tuple[ExpertPlan, ...], tuple[ExpertRing, ...]]:
    """Plans and rings, in program order."""
    plans: list[ExpertPlan] = []
    rings: list[ExpertRing] = []
    routes = {
        step.nodes[0].results[0].name: step for step in graph.steps() if step.kind is StepKind.ROUTE
    }
    for step in graph.steps():
        if step.kind is not StepKind.EXPERTS:
            continue
        route = routes.get(step.nodes[0].operands[1])
        if route is None or expert_step(graph, route) is not step:
            raise UnsupportedGraphError(
                op=step.nodes[0].op.mnemonic,
                location=step.nodes[0].location,
                problem="the kernel loads experts when it has chosen them, so each choice has one "
                "mixture of experts, in the same layer",
                hint="Pass the ids of one mkc.route to one mkc.expert_mlp",
            )
        ring = _ring(graph, step, padded_rows, target, len(rings))
        known = next((one for one in rings if one.slice == ring.slice), None)
        if known is None:
            rings.append(ring)
        plans.append(_plan(graph, step, (known or ring).name))
    return tuple(plans), tuple(rings)


def expert_step(graph: StepGraph, route: Step) -> Step | None:
    """The only step that computes the experts of a choice, None without one or with several."""
    ids = route.nodes[0].results[0].name
    readers = [
        one
        for one in graph.steps()
        if one.kind is StepKind.EXPERTS and one.nodes[0].operands[1] == ids
    ]
    return readers[0] if len(readers) == 1 else None


def plan_name(step: Step) -> str:
    """Of the plan of a step that computes experts."""
    return f"experts_{step.id}"


def _shapes(graph: StepGraph, node: Node) -> tuple[int, int, int]:
    """Experts of a rank, columns of their width, and their inner width."""
    params = graph.sharded.graph.params
    types = tuple(params[name].type for name in node.operands[MATRICES:])
    local, width, inner = expert_matrices(node.op, types)[0]
    return local, width, inner


def _ring(
    graph: StepGraph, step: Step, padded_rows: int, target: Target, number: int
) -> ExpertRing:
    (node,) = step.nodes
    local, width, inner = _shapes(graph, node)
    dtype = graph.sharded.graph.params[node.operands[MATRICES]].type.dtype
    held = ExpertSlice(width=width, inner=inner, dtype=dtype)
    rows, chosen = graph.sharded.graph.rows, graph.resolve(node.operands[1]).width
    wanted = max(FEWEST_SLOTS, ceil(target.dma.saturation_bytes_in_flight / held.bytes))
    groups = node.op.groups if isinstance(node.op, ShardedExpertMlp) else 1
    return ExpertRing(
        name=f"experts_{number}",
        slice=held,
        slots=min(wanted, rows * chosen, local),
        rows=rows,
        padded_rows=padded_rows,
        chosen=chosen,
        experts=local * groups,
    )


def _plan(graph: StepGraph, step: Step, ring: str) -> ExpertPlan:
    (node,) = step.nodes
    local, _, _ = _shapes(graph, node)
    groups, slices = 1, 1
    if isinstance(node.op, ShardedExpertMlp):
        groups, slices = node.op.groups, node.op.slices
    name = plan_name(step)
    return ExpertPlan(
        name=name,
        ring=ring,
        gate_up_array=f"{name}_gate_up",
        down_array=f"{name}_down",
        layers=graph.sharded.graph.params[node.operands[MATRICES]].instances,
        local=local,
        groups=groups,
        slices=slices,
        params=node.operands[MATRICES:],
    )


def route_node(step: Step) -> Route:
    """The operation of a step that chooses experts."""
    op = step.nodes[0].op
    assert isinstance(op, Route)
    return op
