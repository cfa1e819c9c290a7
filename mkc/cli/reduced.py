"""Plans of a small model that exchange as the plan of a large one does, on a smaller mesh."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from itertools import product

from mkc.errors import MkcError
from mkc.ir.graph import Graph
from mkc.passes.p40_collectives import ONE_SHOT
from mkc.passes.p40_collectives import TWO_LEVEL
from mkc.passes.p40_collectives import TWO_PHASE
from mkc.passes.p40_collectives import TWO_STEP
from mkc.passes.pipeline import Lowered
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.program import Program
from mkc.targets import Target

SUMS = (ONE_SHOT, TWO_PHASE, TWO_LEVEL, TWO_STEP)
TWO_LEVELS = (TWO_LEVEL, TWO_STEP)
GATHER_ALL = "shard{gather_all=True}"


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks of a target whose hosts may be fewer and smaller than real ones."""

    target: Target
    ranks: int

    def __str__(self) -> str:
        host = self.target.links.devices_per_host
        if not _has_hosts(host, self.ranks):
            return f"{self.ranks} devices"
        return f"{self.ranks // host} hosts of {host} devices"


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """A kernel to interpret."""

    graph: Graph
    lowered: Lowered
    source: str


@dataclass(frozen=True, kw_only=True)
class SmallPlans:
    """What is run in place of a large plan.

    Attributes:
      missing: kinds of exchanges of the large plan that none of them has.
    """

    mesh: Mesh
    plans: Sequence[SmallPlan]
    missing: Sequence[str]


type Lower = Callable[[Mesh, str], SmallPlan]
"""Of the small model, for a mesh, with further options of passes."""


def small_plans(program: Program, target: Target, lower: Lower) -> SmallPlans:
    """On the smallest mesh where they have every kind of exchange, else where they have most.

    Args:
      program, target: the large plan.

    Raises:
      MkcError: the small model fits no mesh; what the smallest one says.
    """
    wanted = exchange_kinds(program)
    best: SmallPlans | None = None
    refused: MkcError | None = None
    for mesh in smaller_meshes(target, program.ranks):
        try:
            found = _on_mesh(program, wanted, mesh, lower)
        except MkcError as error:
            refused = refused or error
            continue
        if best is None or len(found.missing) < len(best.missing):
            best = found
        if not found.missing:
            break
    if best is None:
        assert refused is not None, "there is no mesh"
        raise refused
    return best


def exchange_kinds(program: Program) -> frozenset[str]:
    """Algorithms, what travels, and among whom."""
    return frozenset(_kind(one) for one in program.exchanges)


def _kind(plan: ExchangePlan) -> str:
    if plan.kind in TWO_LEVELS:
        scattered = ", scattered" if plan.scattered else ""
        return f"{plan.kind} of {plan.wire.value}{scattered}"
    return f"{plan.kind} within hosts" if plan.group else plan.kind


def smaller_meshes(target: Target, ranks: int) -> Iterator[Mesh]:
    """With as many levels, the fewest ranks first; at last the mesh itself."""
    host = target.links.devices_per_host
    if not _has_hosts(host, ranks):
        yield Mesh(target=target, ranks=ranks)
        return
    sizes = product(_parts(ranks // host), _parts(host))
    for hosts, devices in sorted(sizes, key=lambda one: (one[0] * one[1], one)):
        links = replace(target.links, devices_per_host=devices)
        yield Mesh(target=replace(target, links=links), ranks=hosts * devices)


def _has_hosts(host: int, ranks: int) -> bool:
    return 1 < host < ranks and ranks % host == 0


def _parts(count: int) -> list[int]:
    """At least two, so that there is somebody to exchange with."""
    return [one for one in range(2, count + 1) if count % one == 0]


def _on_mesh(program: Program, wanted: frozenset[str], mesh: Mesh, lower: Lower) -> SmallPlans:
    """One plan for each algorithm of sums that adds a kind of exchange; at least one."""
    plans: list[SmallPlan] = []
    found: frozenset[str] = frozenset()
    for options in _options(program):
        plan = lower(mesh, options)
        new = exchange_kinds(plan.lowered.program) & wanted
        if not plans or new - found:
            plans.append(plan)
            found |= new
    return SmallPlans(mesh=mesh, plans=plans, missing=sorted(wanted - found))


def _options(program: Program) -> list[str]:
    """Options that choose for a small model what was chosen for the large one by cost."""
    kinds = {one.kind for one in program.exchanges}
    gathers = [GATHER_ALL] if any(one.startswith("gather") for one in kinds) else []
    sums = [f"collectives{{algorithm={one}}}" for one in SUMS if one in kinds]
    return [",".join([*gathers, one]) for one in sums] or [",".join(gathers)]
