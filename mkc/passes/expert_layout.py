"""How experts are divided over the ranks: groups of ranks, and slices within a group.

With G groups a rank holds every G-th part of the experts, and of each of these a slice of its width
that gets narrower the fewer groups there are. All ranks together read the same bytes; but a step
ends with the group that has most of the chosen experts, and narrow slices fill neither the lanes of
a tile nor the matrix unit. The sum over all ranks behind the experts is the same for every layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass

from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.infer_experts import expert_matrices
from mkc.ir.mxfp4 import GROUP
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.routing import Routing
from mkc.ir.routing import mean_distinct
from mkc.ir.routing import mean_fullest
from mkc.ir.types import DType
from mkc.passes.sharding import ShardedGraph
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.expert_store import ExpertSlice
from mkc.targets import Target

PASS = "shard"
SLICE_ROWS = 16  # a slice of an expert's width is whole tiles of bf16 rows


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Sizes of one mixture of experts.

    Attributes:
      experts, chosen: all of them, and those of a row.
      width: of an expert, inner: what its width is projected from and to.
      is_mxfp4: whether its matrices are 4-bit codes and scales.
    """

    experts: int
    chosen: int
    width: int
    inner: int
    is_mxfp4: bool


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """`groups` groups of `slices` ranks; a rank holds experts / groups, of each width / slices."""

    groups: int
    slices: int

    def __str__(self) -> str:
        return f"{self.groups} groups x {self.slices} slices"


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """What the experts of one step and layer cost the rank that has most to do.

    Attributes:
      experts: that it reads.
      balance: mean number of a group over that; 1.0 when all have as much to do.
      bytes: of these, padding included.
      us: predicted time: the memory or the core, whichever takes longer.
    """

    experts: float
    balance: float
    bytes: float
    us: float

    def __str__(self) -> str:
        return (
            f"{self.experts:.1f} experts, balance {self.balance:.2f}, {self.bytes / 1e6:.1f} MB, "
            f"predicted {self.us:.2f} us"
        )


def possible_layouts(shape: ExpertShape, ranks: int) -> tuple[ExpertLayout, ...]:
    """Layouts that divide experts into whole tiles of rows, and groups of 4-bit floats."""
    unit = GROUP if shape.is_mxfp4 else SLICE_ROWS
    return tuple(
        ExpertLayout(groups=groups, slices=ranks // groups)
        for groups in range(1, ranks + 1)
        if ranks % groups == 0
        and shape.experts % groups == 0
        and (groups == ranks or shape.width % (ranks // groups * unit) == 0)
    )


def expert_slice(shape: ExpertShape, layout: ExpertLayout) -> ExpertSlice:
    """What a rank holds of an expert."""
    return ExpertSlice(
        width=shape.width // layout.slices,
        inner=shape.inner,
        dtype=DType.E2M1X2 if shape.is_mxfp4 else DType.BF16,
    )


def layout_cost(
    shape: ExpertShape, layout: ExpertLayout, rows: int, routing: Routing, target: Target
) -> LayoutCost:
    """Of one layer, for `rows` token rows."""
    experts = mean_fullest(shape.experts, shape.chosen, rows, layout.groups, routing)
    mean = mean_distinct(shape.experts, shape.chosen, rows, routing) / layout.groups
    held = expert_slice(shape, layout)
    push_us = held.pushed / target.mxu.width**2 * target.mxu.push_us
    us = max(held.bytes / target.hbm.sustained_bytes_per_us, push_us)
    return LayoutCost(
        experts=experts,
        balance=mean / experts,
        bytes=experts * held.bytes,
        us=experts * us,
    )


def choose_expert_groups(
    graph: Graph,
    ranks: int,
    target: Target | None,
    log: DecisionLog,
    *,
    like: ShardedGraph | None = None,
) -> dict[str, int]:
    """First matrix of every mixture of experts -> number of groups.

    The rows of one sequence decide, with uniform routing, so that experts lie alike for every
    batch. A mixture that no layout divides is left out; `target` None takes the fewest groups.

    Args:
      like: another graph over the same parameters, whose choices are taken over.
    """
    found: dict[str, int] = {}
    for node in _mixtures(graph):
        key, shape = node.operands[3], expert_shape(graph, node)
        layouts = possible_layouts(shape, ranks)
        if like is not None and key in like.expert_groups:
            found[key] = like.expert_groups[key]
        elif layouts and target is not None:
            found[key] = _cheapest(shape, layouts, graph.rows_per_sequence, target, log).groups
        elif layouts:
            found[key] = layouts[0].groups
    return found


def _cheapest(
    shape: ExpertShape,
    layouts: Iterable[ExpertLayout],
    rows: int,
    target: Target,
    log: DecisionLog,
) -> ExpertLayout:
    tables = {one: _costs(shape, one, rows, target) for one in layouts}
    best = min(tables, key=lambda one: tables[one][Routing.UNIFORM].us)
    name = "e2m1x2" if shape.is_mxfp4 else "bf16"
    log.choose(
        f"shard.experts.{shape.experts}x{shape.width}x{shape.inner}_{name}",
        passed=PASS,
        chosen=f"{best}: {_told(tables[best])}",
        because=f"of a layer's experts, on the rank that reads most, for {rows} rows that choose "
        f"{shape.chosen} of {shape.experts} each",
        rejected={str(one): _told(costs) for one, costs in tables.items() if one != best},
    )
    return best


def _costs(
    shape: ExpertShape, layout: ExpertLayout, rows: int, target: Target
) -> dict[Routing, LayoutCost]:
    return {one: layout_cost(shape, layout, rows, one, target) for one in Routing}


def _told(costs: Mapping[Routing, LayoutCost]) -> str:
    return "; ".join(f"{routing}: {cost}" for routing, cost in costs.items())


def _mixtures(graph: Graph) -> list[Node]:
    return [node for node in graph.body.nodes() if isinstance(node.op, ExpertMlp)]


def expert_shape(graph: Graph, node: Node) -> ExpertShape:
    """Sizes of the experts that a node reads, as a whole."""
    matrices = tuple(graph.params[name].type for name in node.operands[3:])
    experts, width, inner = expert_matrices(node.op, matrices)[0]
    types = {value.name: value.type for one in graph.body.nodes() for value in one.results}
    return ExpertShape(
        experts=experts,
        chosen=types[node.operands[1]].shape[1],
        width=width,
        inner=inner,
        is_mxfp4=matrices[0].dtype is DType.E2M1X2,
    )
