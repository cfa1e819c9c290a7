"""Kimi K3 graphs to divide and lower: full size, golden, and cut down to a kind of layer."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from json import loads
from pathlib import Path
from typing import Any

from mkc.ir.graph import Graph
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import infer_local
from mkc.passes.pipeline import Pipeline as Pipeline  # registers the SHARD facets
from mkc.passes.sharding import ShardedGraph
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target
from models.kimi_k3 import MODEL
from tests.kimi_goldens import kimi_case

CONFIG = Path(__file__).parents[2] / "models" / "configs" / "kimi_k3.json"
MANY_DEVICES = "tpu7x:2x2x4"


@cache
def full_kimi(*, batch: int = 1) -> Graph:
    """93 layers, 896 experts in MXFP4."""
    return MODEL.trace(loads(CONFIG.read_text()), batch=batch, context=4096)


def small_kimi(
    *, layers: int, latent: Iterable[int], dense: int, mxfp4: bool = False, batch: int = 1
) -> Graph:
    """The golden model with fewer layers.

    Args:
      latent: layers with latent attention, counted from 1; the others have delta attention.
      dense: the first so many have no experts.
    """
    return MODEL.trace(
        small_config(layers=layers, latent=latent, dense=dense, mxfp4=mxfp4),
        batch=batch,
        context=128,
    )


def small_config(
    *, layers: int, latent: Iterable[int], dense: int, mxfp4: bool = False
) -> dict[str, Any]:
    """Its config; arguments as for `small_kimi`."""
    case = kimi_case("kimi_k3_mini_mxfp4" if mxfp4 else "kimi_k3_mini")
    config = deepcopy(dict(case.config))
    text = config["text_config"]
    text["num_hidden_layers"] = layers
    text["first_k_dense_replace"] = dense
    full = set(latent)
    kinds = text["linear_attn_config"]
    kinds["full_attn_layers"] = sorted(full)
    kinds["kda_layers"] = [one for one in range(1, layers + 1) if one not in full]
    return config


def divided(graph: Graph, ranks: int) -> tuple[ShardedGraph, DecisionLog]:
    """The graph of one rank, checked, and what was decided."""
    log = DecisionLog()
    sharded = Shard(ranks=ranks).apply(graph, log, target=load_target(MANY_DEVICES))
    infer_local(sharded.graph)
    return sharded, log
