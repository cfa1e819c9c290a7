"""Which small plans are interpreted in place of a large one: the mesh, and what they exchange."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
from mkc.cli.reduced import Mesh
from mkc.cli.reduced import SmallPlan
from mkc.cli.reduced import SmallPlans
from mkc.cli.reduced import exchange_kinds
from mkc.cli.reduced import small_plans
from mkc.cli.reduced import smaller_meshes
from mkc.driver import lower_graph
from mkc.errors import ShardingError
from mkc.ir.graph import Graph
from mkc.schedule.program import Program
from mkc.targets import Target
from mkc.targets import load_target
from tests.kernel.test_group_gathers import decoder
from tests.passes.lowering import dense_graph

HOSTS = load_target("tpu7x:2x2x4")  # four of eight devices
GATHERED = mkc.trace(decoder, name="groups", batch=1, context=64)
GATHERS = "shard{gather_all=True}"


def lower(graph: Graph, mesh: Mesh, options: str) -> SmallPlan:
    found = lower_graph(graph, mesh.target, tp=mesh.ranks, passes=options)
    return SmallPlan(graph=graph, lowered=found, source="")


def large(graph: Graph, target: Target, ranks: int, options: str) -> Program:
    return lower(graph, Mesh(target=target, ranks=ranks), options).lowered.program


def reduced(program: Program, graph: Graph, target: Target) -> SmallPlans:
    return small_plans(program, target, lambda mesh, options: lower(graph, mesh, options))


def test_meshes_of_two_levels_get_larger() -> None:
    found = [str(one) for one in smaller_meshes(HOSTS, 32)]
    assert found[0] == "2 hosts of 2 devices"
    assert found[-1] == "4 hosts of 8 devices"
    assert len(found) == 6


@pytest.mark.parametrize("ranks", [1, 2, 8, 12])
def test_a_mesh_of_one_level_stays(ranks: int) -> None:
    """Devices of one host, or of hosts that ranks do not fill."""
    assert [str(one) for one in smaller_meshes(HOSTS, ranks)] == [f"{ranks} devices"]


def test_a_small_plan_sums_as_the_large_one() -> None:
    """Of its own cost it would take another algorithm."""
    graph = dense_graph()
    sums = "collectives{algorithm=two_level}"
    program = large(graph, four_hosts(), 8, sums)
    found = reduced(program, graph, four_hosts())
    assert str(found.mesh) == "2 hosts of 2 devices"
    assert found.missing == []
    (plan,) = found.plans
    assert exchange_kinds(plan.lowered.program) == exchange_kinds(program)
    alone = lower(graph, found.mesh, "").lowered.program
    assert exchange_kinds(alone) != exchange_kinds(program)


def test_what_is_gathered_within_hosts_is_so_in_the_small_plan() -> None:
    program = large(GATHERED, four_hosts(), 8, GATHERS)
    found = reduced(program, GATHERED, four_hosts())
    assert any("within hosts" in one for one in exchange_kinds(program))
    assert found.missing == []


def test_kinds_that_a_small_model_does_not_have_are_told() -> None:
    program = large(GATHERED, four_hosts(), 8, GATHERS)
    found = reduced(program, dense_graph(), four_hosts())
    assert len(found.missing) == 1
    assert "gather" in found.missing[0]


def test_a_model_that_no_mesh_divides_is_refused() -> None:
    def refuse(mesh: Mesh, options: str) -> SmallPlan:
        raise ShardingError(op="linear", dimension="heads", units=7, tp=mesh.ranks, possible=[1, 7])

    with pytest.raises(ShardingError, match="tp 4 does not divide"):
        small_plans(large(GATHERED, four_hosts(), 8, ""), four_hosts(), refuse)


def four_hosts() -> Target:
    """Of two devices each."""
    return replace(HOSTS, links=replace(HOSTS.links, devices_per_host=2))
