"""Deterministic weights of the golden models, recomputed instead of stored.

A tensor is a function of its checkpoint name, its type and the seed of the case:

1. Words: Philox4x64-10, counter 0, keyed by the first 16 bytes of SHA-256 of `<seed>/<name>`; one
   64-bit word per element in row-major order.
2. `bell`: the sum of the word's four 16-bit lanes, centred, divided by its standard deviation.
   `uniform`: the top 24 bits.
3. A rule chosen by the name, see `values`.
4. Rounded to f32, then to bf16 where the parameter is stored as bf16.

Only integer sums, double products and roundings to nearest even: the bytes are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from hashlib import sha256
from math import gcd
from math import prod
from math import sqrt
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from mkc import DType
from mkc import Graph

type Doubles = NDArray[np.float64]
type Shape = tuple[int, ...]

EMBEDDING = "model.language_model.embed_tokens.weight"
RESERVED_IDS = 16  # the last ids of a vocabulary follow no other token
HEAD_BOOST = 16.0  # how strongly a token's embedding points at its two successors
SUCCESSORS = ((101, 17), (211, 59))  # (smallest multiplier, offset) of the two permutations of ids
LANE_STD = sqrt(4 * (65536.0**2 - 1) / 12)  # of a sum of four uniform 16-bit integers

# Entries of a projection have standard deviation gain / sqrt(inputs); 1 where not named here.
GAINS = {
    "linear_attn.out_proj": 0.7,
    "linear_attn.in_proj_a": 0.8,
    "mlp.down_proj": 0.8,
    "self_attn.o_proj": 1.2,
}


def weights(graph: Graph, seed: int) -> dict[str, NDArray[Any]]:
    """Every tensor that the graph's parameters name, in the dtype of the parameter."""
    return {
        name: tensor(name, shape, dtype, seed) for name, shape, dtype in checkpoint_tensors(graph)
    }


def checkpoint_tensors(graph: Graph) -> Iterator[tuple[str, Shape, DType]]:
    """Name, shape and dtype of each checkpoint tensor."""
    for param in graph.params.values():
        for name in param.tensor_names():
            yield name, param.tensor_type.shape, param.type.dtype


def digest(tensors: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over name, dtype, shape and bytes of all tensors in name order."""
    total = sha256()
    for name in sorted(tensors):
        array = tensors[name]
        dtype = "BF16" if array.dtype == bfloat16 else str(array.dtype)
        total.update(f"{name}|{dtype}|{list(array.shape)}|".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def tensor(name: str, shape: Shape, dtype: DType, seed: int) -> NDArray[Any]:
    """One tensor as a checkpoint stores it."""
    single = values(name, shape, seed).astype(np.float32)
    return single.astype(bfloat16) if dtype is DType.BF16 else single


def values(name: str, shape: Shape, seed: int) -> Doubles:
    """The unrounded numbers of one tensor."""
    stem = name.removesuffix(".weight")
    if stem.endswith("A_log"):
        return uniform(name, seed, shape, 0.0, 2.5)
    if stem.endswith("dt_bias"):
        return uniform(name, seed, shape, -5.5, -1.0)
    noise = bell(name, seed, shape)
    if stem.endswith("conv1d"):
        noise *= 0.3
        noise[..., -1] += 0.7  # the newest input
        return noise
    if stem.endswith("linear_attn.norm"):
        return 1.0 + 0.15 * noise
    if stem.endswith("norm"):
        return 0.15 * noise  # the model adds 1 itself
    if name == EMBEDDING:
        return noise
    if stem == "lm_head":
        table = tensor(EMBEDDING, shape, DType.BF16, seed).astype(np.float64)
        return noise / sqrt(shape[1]) + successor_rows(table, HEAD_BOOST)
    gain = next((gain for end, gain in GAINS.items() if stem.endswith(end)), 1.0)
    return gain / sqrt(shape[-1]) * noise


def successor_rows(table: Doubles, boost: float) -> Doubles:
    """What makes greedy decoding well separated: the head's row of each id leans towards the
    embeddings of two other ids, its predecessors."""
    vocab, hidden = table.shape
    live = vocab - RESERVED_IDS
    rows = np.zeros(table.shape)
    ids = np.arange(live)
    for multiplier, offset in SUCCESSORS:
        while gcd(multiplier, live) != 1:
            multiplier += 2
        rows[(multiplier * ids + offset) % live] += boost / hidden * table[:live]
    return rows


def words(name: str, seed: int, count: int) -> NDArray[np.uint64]:
    """The first `count` raw words of the tensor's stream."""
    key = np.frombuffer(sha256(f"{seed}/{name}".encode()).digest()[:16], dtype="<u8")
    stream = np.random.Philox(key=key.astype(np.uint64), counter=0)
    return stream.random_raw(count)


def bell(name: str, seed: int, shape: Shape) -> Doubles:
    """Mean 0, standard deviation 1, magnitude below 3.47."""
    lanes = words(name, seed, prod(shape)).astype("<u8").view("<u2").reshape(-1, 4)
    total = lanes.sum(axis=1, dtype=np.int64).astype(np.float64)
    result: Doubles = ((total - 2 * 65535.0) / LANE_STD).reshape(shape)
    return result


def uniform(name: str, seed: int, shape: Shape, low: float, high: float) -> Doubles:
    """Uniform on [low, high)."""
    fraction = (words(name, seed, prod(shape)) >> np.uint64(40)).astype(np.float64) / 2.0**24
    return low + (high - low) * fraction.reshape(shape)
