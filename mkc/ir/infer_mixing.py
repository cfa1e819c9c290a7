"""Shape inference of `mkc.ir.ops_mixing`; registers its operations in the text form."""

from __future__ import annotations

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.infer import Types
from mkc.ir.infer import no_states
from mkc.ir.infer import require
from mkc.ir.infer import require_positions
from mkc.ir.infer import require_rank
from mkc.ir.infer import require_rows
from mkc.ir.infer import take
from mkc.ir.ops import Op
from mkc.ir.ops_mixing import MIXING_OPS
from mkc.ir.ops_mixing import MIXING_STATE_KINDS
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.register import STATE_KINDS
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

MNEMONICS.update({op_type.mnemonic: op_type for op_type in MIXING_OPS})
STATE_KINDS.update(MIXING_STATE_KINDS)


@INFER.register(LatentAttention)
def _latent_attention(op: LatentAttention, operands: Types, states: Types) -> Types:
    what = "q, shared q, latent, shared k, up, positions"
    q, shared_q, latent, shared_k, up, positions = take(op, operands, 6, what)
    take(op, states, 2, "latent and shared key cache, or key and value cache")
    require_rank(op, "q", q, 3, "[rows, heads, dim]")
    require_rank(op, "latent", latent, 2, "[rows, rank]")
    require_rank(op, "shared k", shared_k, 2, "[rows, shared dim]")
    require_rank(op, "up", up, 2, "[heads * (key dim + value dim), rank]")
    for name, one in (("shared q", shared_q), ("latent", latent), ("shared k", shared_k)):
        require_rows(op, q, name, one)
    require_positions(op, positions)
    heads, dim, shared = q.shape[1], q.shape[2], shared_k.shape[1]
    require(
        shared_q.shape[1:] == (heads, shared),
        op,
        f"shared q [rows, {heads}, {shared}], heads as in q and channels as in shared k",
        shared_q,
        "Slice both queries from one projection",
    )
    require(
        up.shape[0] % heads == 0 and up.shape[0] // heads > dim and up.shape[1] == latent.shape[1],
        op,
        f"up [{heads} heads x ({dim} + value dim), {latent.shape[1]}]",
        up,
        "Declare the rows of each head: its key, then its value",
    )
    value_dim = up.shape[0] // heads - dim
    forms = {
        CacheForm.LATENT: ((1, latent.shape[1]), (1, shared)),
        CacheForm.EXPANDED: ((heads, dim + shared), (heads, value_dim)),
    }
    for cache, wanted in zip(states, forms[op.cache], strict=True):
        require(
            cache.rank == 3 and cache.shape[1:] == wanted and cache.dtype is latent.dtype,
            op,
            f"with cache = {op.cache}: a cache {latent.dtype}[context, {wanted[0]}, {wanted[1]}]",
            cache,
            "Create the caches with mkc.latent_cache",
        )
    return (TensorType(dtype=q.dtype, axes=(*q.axes[:2], axis(value_dim, "dim"))),)


@INFER.register(ScaleHeads)
def _scale_heads(op: ScaleHeads, operands: Types, states: Types) -> Types:
    x, factor = take(op, operands, 2, "x, factor")
    no_states(op, states)
    require_rank(op, "x", x, 3, "[rows, heads, dim]")
    require(
        factor.shape == x.shape[1:2],
        op,
        f"a factor of {x.shape[1]} heads",
        factor,
        "Give one number for each head of x",
    )
    return (x,)


@INFER.register(ResidualBlocks)
def _residual_blocks(op: ResidualBlocks, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, n]")
    require(op.slots > 0, op, "at least one slot", op.slots, "Count the blocks that are stored")
    blocks = TensorType(dtype=x.dtype, axes=(x.axes[0], axis(op.slots), x.axes[1]))
    return (blocks, TensorType(dtype=DType.I32, axes=x.axes[:1]))


@INFER.register(StoreBlock)
def _store_block(op: StoreBlock, operands: Types, states: Types) -> Types:
    blocks, count, x = take(op, operands, 3, "blocks, count, x")
    no_states(op, states)
    _require_blocks(op, blocks, count, x)
    _require_period(op, op.period)
    return (blocks, count, x)


@INFER.register(MixBlocks)
def _mix_blocks(op: MixBlocks, operands: Types, states: Types) -> Types:
    blocks, count, x, norm, projection = take(op, operands, 5, "blocks, count, x, norm, projection")
    no_states(op, states)
    _require_blocks(op, blocks, count, x)
    _require_period(op, op.period)
    width = x.shape[1]
    for name, one, shape in (("norm", norm, (width,)), ("projection", projection, (1, width))):
        require(
            one.shape == shape,
            op,
            f"{name} of shape {list(shape)}",
            one,
            "Declare it with the width of x",
        )
    return (x,)


def _require_period(op: Op, period: int) -> None:
    require(period > 0, op, "a period of at least one layer", period, "Count from one store on")


def _require_blocks(op: Op, blocks: TensorType, count: TensorType, x: TensorType) -> None:
    require_rank(op, "x", x, 2, "[rows, n]")
    require(
        blocks.rank == 3
        and (blocks.shape[0], blocks.shape[2]) == x.shape
        and blocks.dtype is x.dtype
        and count.dtype is DType.I32
        and count.shape == x.shape[:1],
        op,
        f"blocks {x.dtype}[{x.shape[0]}, slots, {x.shape[1]}] and count i32[{x.shape[0]}]",
        f"{blocks}, {count}",
        "Take both from mkc.residual_blocks or mkc.store_block",
    )
