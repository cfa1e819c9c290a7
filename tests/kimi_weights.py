"""Weights of the golden Kimi K3 models, by the rules of `tests.generate_weights` and their own.

Embeddings share a direction that the router reads as a negative offset, so that the last chosen
expert has a small weight. The latent rows of two projections are small, so that the epsilon of the
norms behind them is visible. Experts are made in bf16; the packed form is quantised from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from mkc import DType
from mkc import Graph
from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import MAGNITUDES
from mkc.ir.mxfp4 import SCALE_BIAS
from tests.generate_weights import Doubles
from tests.generate_weights import Shape
from tests.generate_weights import bell
from tests.generate_weights import checkpoint_tensors
from tests.generate_weights import successor_rows
from tests.generate_weights import uniform
from tests.generate_weights import words

EMBEDDING = "language_model.model.embed_tokens.weight"
HEAD_BOOST = 28.0
SMALL = 0.03  # of rows in front of the norms of latent attention
# As in `tests.generate_weights`.
GAINS = {
    "block_sparse_moe.gate": 3.5,
    "routed_expert_up_proj": 0.2,
    "shared_experts.down_proj": 0.8,
    "f_b_proj": 0.6,
    "res_proj": 0.8,
    "mlp.down_proj": 0.8,
    "o_proj": 1.2,
    "q_a_proj": SMALL,
}
# Weights along the shared direction, divided by the width.
LEANINGS = {"block_sparse_moe.gate": -12.0, "mlp_res_proj": 3.0, "output_attn_res_proj": 2.5}


def kimi_weights(graph: Graph, seed: int, *, heads: int) -> dict[str, NDArray[Any]]:
    """Every tensor that the graph's parameters name, as a checkpoint stores it."""
    found: dict[str, NDArray[Any]] = {}
    for name, shape, dtype in checkpoint_tensors(graph):
        if dtype is DType.E8M0:
            continue  # made with the codes
        if dtype is DType.E2M1X2:
            master = name.removesuffix("_packed")
            wide = expert(master, (shape[0], 2 * shape[1]), seed).astype(np.float32)
            codes, scales = packed(wide)
            found[name], found[master + "_scale"] = codes, scales
            continue
        single = values(name, shape, seed, heads).astype(np.float32)
        found[name] = single.astype(bfloat16) if dtype is DType.BF16 else single
    return found


def decoded(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same checkpoint with plain experts: exactly the values of the packed ones, in bf16."""
    found = {name: one for name, one in tensors.items() if one.dtype != np.uint8}
    magnitudes = np.array([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    for name, codes in tensors.items():
        if name.endswith("_packed"):
            master = name.removesuffix("_packed")
            numbers = magnitudes[np.stack([codes & 15, codes >> 4], axis=-1)]
            exponents = tensors[master + "_scale"].astype(int) - SCALE_BIAS
            grouped = numbers.reshape(*exponents.shape, GROUP)
            wide = np.ldexp(grouped, exponents[..., None])
            found[master] = wide.reshape(codes.shape[0], -1).astype(np.float32).astype(bfloat16)
    return found


def packed(wide: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and scales of a matrix: nearest value, ties to the even code, 6 at most."""
    rows, columns = wide.shape
    groups = wide.astype(np.float64).reshape(rows, columns // GROUP, GROUP)
    exponents = np.frexp(np.abs(groups).max(axis=-1))[1] - 3  # the largest becomes 4 .. 8
    scaled = np.ldexp(groups, -exponents[..., None])
    levels = np.array(MAGNITUDES)
    distance = np.abs(np.abs(scaled)[..., None] - levels)
    best = distance.min(axis=-1, keepdims=True)
    # Of two levels that are as near, that of the even code.
    order = np.where(distance == best, np.arange(len(levels)) % 2, 2)
    numbers = order.argmin(axis=-1) | (np.signbit(groups) << 3)
    codes = numbers.reshape(rows, columns)
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return pairs.astype(np.uint8), (exponents + SCALE_BIAS).astype(np.uint8)


def values(name: str, shape: Shape, seed: int, heads: int) -> Doubles:
    """The unrounded numbers of one tensor; `heads` entries of A_log count, the others are zero."""
    stem = name.removesuffix(".weight")
    if ".experts." in name:
        return expert(name, shape, seed).astype(np.float64)
    if stem.endswith("A_log"):
        return uniform(name, seed, shape, 0.0, 1.2) * (np.arange(shape[0]) < heads)
    if stem.endswith("dt_bias"):
        return uniform(name, seed, shape, -2.5, -0.3)
    if stem.endswith("e_score_correction_bias"):
        return uniform(name, seed, shape, -0.001, 0.001)
    noise = bell(name, seed, shape)
    if stem.endswith("conv1d"):
        noise *= 0.3
        noise[..., -1] += 0.7  # the newest input
        return noise
    if stem.endswith("norm"):
        return 1.0 + 0.15 * noise
    if name == EMBEDDING:
        return 0.8 * noise + 0.6 * direction(seed, shape[1])
    if stem.endswith("lm_head"):
        single = values(EMBEDDING, shape, seed, heads).astype(np.float32)
        table = single.astype(bfloat16).astype(np.float64)
        return noise / sqrt(shape[1]) + successor_rows(table, HEAD_BOOST)
    gain = next((gain for end, gain in GAINS.items() if stem.endswith(end)), 1.0)
    found = gain / sqrt(shape[-1]) * noise
    for end, leaning in LEANINGS.items():
        if stem.endswith(end):
            found += leaning / shape[1] * direction(seed, shape[1])
    if stem.endswith("kv_a_proj_with_mqa"):
        found[: latent_rows(shape)] *= SMALL
    return found


def latent_rows(shape: Shape) -> int:
    """Rows of the latent vector; behind them is the shared key, half as wide in these models."""
    return shape[0] * 2 // 3


def expert(name: str, shape: Shape, seed: int) -> NDArray[Any]:
    """A matrix of an expert in bf16, with groups of various exponents."""
    rows, columns = shape
    noise = bell(name, seed, shape) / sqrt(columns)
    draws = words(f"{name}#exponent", seed, rows * columns // GROUP) % np.uint64(4)
    exponents = np.array([-1, 0, 0, 1])[draws.astype(np.int64)]
    numbers = np.ldexp(noise.reshape(-1, GROUP), exponents[:, None]).reshape(shape)
    rounded: NDArray[Any] = numbers.astype(np.float32).astype(bfloat16)
    return rounded


def direction(seed: int, width: int) -> Doubles:
    """The direction that embeddings share: plus or minus 1 for each channel."""
    return np.where(words("mean-direction", seed, width) >> np.uint64(63), 1.0, -1.0)
