"""The golden DSpark drafter: its expected tensors, its weights, and rounds with its target."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from json import loads
from math import sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mkc import Graph
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from models.dspark import DRAFTER
from models.kimi_k3 import MODEL
from tests.generate_weights import Doubles
from tests.generate_weights import Shape
from tests.generate_weights import bell
from tests.generate_weights import checkpoint_tensors
from tests.generate_weights import successor_rows
from tests.goldens import CONTEXT
from tests.goldens import FOLDER
from tests.goldens import Golden
from tests.kimi_goldens import kimi_case

SPARK_CASE = "dspark_mini"
SPARK_TARGET = "kimi_k3_mini"
MARKOV = "markov_head.markov_w1.weight"
MARKOV_BOOST = 6.0  # how strongly a token's row points at its two successors
GAINS = {"o_proj": 1.2, "mlp.down_proj": 0.8}


@cache
def spark_case() -> Golden:
    """The drafter's case; its `graph` and `weights` are not used."""
    folder = FOLDER / SPARK_CASE
    return Golden(
        name=SPARK_CASE,
        meta=loads((folder / "meta.json").read_text()),
        expected=load_file(folder / "expected.safetensors"),
    )


def spark_round(*, batch: int = 1, context: int = CONTEXT, **changes: Any) -> Round:
    """Rounds of the golden target and drafter; `changes` are of the drafter's config."""
    target, draft = kimi_case(SPARK_TARGET).config, spark_case().meta["config"]
    return block_round(MODEL, target, DRAFTER, draft | changes, batch=batch, context=context)


@cache
def spark_round_weights() -> Mapping[str, NDArray[Any]]:
    """Tensors of target and drafter by their names in a round's graph."""
    drafts = draft_weights(spark_round().graph, spark_case().meta["seed"])
    return {**kimi_case(SPARK_TARGET).weights(), **drafts}


@cache
def spark_weights() -> dict[str, NDArray[Any]]:
    """The drafter's tensors by checkpoint name."""
    found = draft_weights(spark_round().graph, spark_case().meta["seed"])
    return {name.removeprefix(DRAFT_NAMESPACE): one for name, one in found.items()}


def draft_weights(graph: Graph, seed: int) -> dict[str, NDArray[Any]]:
    """The drafter's tensors by their names in a round's graph."""
    return {
        name: spark_values(name.removeprefix(DRAFT_NAMESPACE), shape, seed)
        .astype(np.float32)
        .astype(bfloat16)
        for name, shape, _ in checkpoint_tensors(graph)
        if name.startswith(DRAFT_NAMESPACE)
    }


def spark_values(name: str, shape: Shape, seed: int) -> Doubles:
    """Unrounded numbers of one tensor; see `tests.generate_weights`."""
    stem = name.removesuffix(".weight")
    noise = bell(name, seed, shape)
    if stem.endswith("norm"):
        return 1.0 + 0.15 * noise
    if stem in ("embed_tokens", MARKOV.removesuffix(".weight")):
        return noise
    if stem.endswith("bias"):
        return 0.1 * noise
    if stem.endswith("markov_w2"):
        table = bell(MARKOV, seed, shape).astype(np.float32).astype(bfloat16).astype(np.float64)
        return 0.5 / sqrt(shape[1]) * noise + successor_rows(table, MARKOV_BOOST)
    gain = next((gain for end, gain in GAINS.items() if stem.endswith(end)), 1.0)
    return gain / sqrt(shape[-1]) * noise
