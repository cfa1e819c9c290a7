"""Which form of the cache of latent attention a step is fastest with; see `mkc.ir.cache_form`.

Heads are divided over ranks and latents are not: the more ranks, the smaller an expanded cache of a
rank, while its cache of latents stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.cache_form import with_cache_form
from mkc.ir.cost import MXU_BLOCK
from mkc.ir.cost import Cost
from mkc.ir.cost import node_cost
from mkc.ir.cost import value_types
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Repeat
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.schedule.decisions import DecisionLog
from mkc.targets import Target

PASS = "shard"


@dataclass(frozen=True, kw_only=True)
class FormCost:
    """What all latent attention of a step costs a rank whose caches are full.

    Attributes:
      bytes: of caches, and of the weights that fold or expand.
      us: predicted time: the memory or the matrix unit, whichever takes longer.
    """

    bytes: int
    us: float

    def __str__(self) -> str:
        return f"{self.bytes / 1e6:.2f} MB, predicted {self.us:.2f} us"


def form_cost(graph: Graph, form: CacheForm, target: Target) -> FormCost:
    """Of the graph of a rank with all of its caches in `form`."""
    cost = _latent_attention(with_cache_form(graph, form))
    moved = cost.weight_bytes + cost.state_read_bytes + cost.state_write_bytes
    push_us = cost.mxu_pushes * (MXU_BLOCK / target.mxu.width) ** 2 * target.mxu.push_us
    return FormCost(bytes=moved, us=max(moved / target.hbm.sustained_bytes_per_us, push_us))


def _latent_attention(graph: Graph) -> Cost:
    """Of one step, nothing but the latent attention."""
    types = value_types(graph)

    def block_cost(block: Block) -> Cost:
        total = Cost()
        for item in block.items:
            if isinstance(item, Repeat):
                total += block_cost(item.body).times(item.count)
            elif isinstance(item.op, LatentAttention):
                total += node_cost(graph, item, types)
        return total

    return block_cost(graph.body)


def record_cache_form(graph: Graph, target: Target, log: DecisionLog) -> None:
    """Records the choice for the graph of a rank; nothing where there is no latent attention.

    The kernel reads caches of latents only, so those are chosen even where the others would cost
    less; the decision says so. A graph with expanded caches is refused where it is lowered.
    """
    forms = {node.op.cache for node in graph.body.nodes() if isinstance(node.op, LatentAttention)}
    if forms != {CacheForm.LATENT}:
        return
    latent, expanded = (form_cost(graph, form, target) for form in CacheForm)
    reason = "of the latent attention of a step on one rank, caches full"
    if expanded.us < latent.us:
        reason += "; an expanded cache would cost less, but the kernel reads none"
    log.choose(
        "shard.cache_form",
        passed=PASS,
        chosen=f"{CacheForm.LATENT}: {latent}",
        because=reason,
        rejected={str(CacheForm.EXPANDED): str(expanded)},
    )
