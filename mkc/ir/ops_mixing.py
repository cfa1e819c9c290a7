"""Operations that mix tokens through a compressed cache, and residual streams with each other.

As in `mkc.ir.ops`, a class says operands, states and results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from mkc.ir.graph import StateKind
from mkc.ir.ops import Op


class CacheForm(StrEnum):
    """What a cache of latent attention holds for a position.

    `latent`: the latent vector and the shared key; keys and values of the heads are never formed,
    their projection is folded into query and output. `expanded`: keys and values of every head.
    """

    LATENT = "latent"
    EXPANDED = "expanded"


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Op):
    """q [rows, heads, d], shared q [rows, heads, s], latent [rows, rank], shared k [rows, s],
    up [heads * (d + dv), rank], positions i32 [rows]; two states KV_CACHE -> [rows, heads, dv] in
    q's dtype.

    Of a head's rows of `up` the first d give its key, the others its value: k = up_k latent, v =
    up_v latent. The score of a position is (q . k + shared q . shared k) * scale: `shared k` is the
    same for all heads. Writes each row at its position, then attends to positions 0 .. position.
    Scores and softmax in f32.

    The states are latent [context, 1, rank] and shared key [context, 1, s], with q . k = (up_k^T q)
    . latent and the values summed as latents, all in f32; or, with `cache` expanded, key [context,
    heads, d + s] and value [context, heads, dv], rounded to the cache's dtype. The mathematics is
    the same, so that a planner may choose, see `mkc.ir.cache_form`.
    """

    mnemonic: ClassVar[str] = "latent_attention"
    scale: float
    cache: CacheForm = CacheForm.LATENT


@dataclass(frozen=True, kw_only=True)
class ScaleHeads(Op):
    """x [rows, heads, n], factor [heads] -> like x: every head times its factor."""

    mnemonic: ClassVar[str] = "scale_heads"


@dataclass(frozen=True, kw_only=True)
class ResidualBlocks(Op):
    """x [rows, n] -> blocks [rows, slots, n] in x's dtype, count i32 [rows]: none stored yet.

    Of x only the type counts. `count` is how many layers have offered a vector, the same for all
    rows; it is a value, and not an attribute, so that layers which differ in it alone are alike.
    """

    mnemonic: ClassVar[str] = "residual_blocks"
    slots: int


@dataclass(frozen=True, kw_only=True)
class StoreBlock(Op):
    """blocks [rows, slots, n], count i32 [rows], x [rows, n] -> blocks, count + 1, like x.

    The first vector that is offered is stored, and then each `period`-th one, behind the others:
    x where count is a multiple of `period`. The stream starts anew behind it: the last result is
    zeros then, and x otherwise.
    """

    mnemonic: ClassVar[str] = "store_block"
    period: int = 1


@dataclass(frozen=True, kw_only=True)
class MixBlocks(Op):
    """blocks [rows, slots, n], count i32 [rows], x [rows, n], norm [n], projection [1, n]
    -> like x: a weighted sum of the stored blocks and x.

    Stored are the first ceil(count / period) blocks, see `StoreBlock`.

    The weights are the softmax of sum_d(v_d * rsqrt(mean(v^2) + eps) * norm_d * projection_d) over
    these vectors v. All in f32, rounded once.
    """

    mnemonic: ClassVar[str] = "mix_blocks"
    eps: float
    period: int = 1


MIXING_OPS: tuple[type[Op], ...] = (
    LatentAttention,
    MixBlocks,
    ResidualBlocks,
    ScaleHeads,
    StoreBlock,
)

# As `mkc.ir.register.STATE_KINDS`.
MIXING_STATE_KINDS: dict[type[Op], tuple[StateKind, ...]] = {
    LatentAttention: (StateKind.KV_CACHE, StateKind.KV_CACHE),
}
