"""What prefill computes in another order than the reference meaning, over many rows of a sequence.

Shapes: L sequences (lanes) of T consecutive rows. Padding rows (see `Graph.inputs`) stand last.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.reference_ops import wide

AXIS = "tp"  # mesh axis
# Rows per step of the chunked delta rule. Its triangular systems are as large; at 64, as in public
# implementations, they fill half a matrix unit and the number of steps is still small.
DELTA_CHUNK = 64
# The same where a decay is one of each key channel. Products of rows are then sums with a factor of
# their own for every pair and channel, whose number grows with the rows of a chunk.
CHANNEL_CHUNK = 16
ATTENTION_TILE = 512  # positions per step: scores are [lanes, heads, T, 512] whatever the context
# A masked score and the first running maximum: finite, so that no difference is NaN, and so low
# that its exponential against any real score is zero.
MASKED = -1e30
HIGHEST = lax.Precision.HIGHEST

# Largest score so far, sum of exponentials, and the values weighted with them.
type Softmax = tuple[Array, Array, Array]


def chunked_delta_rule(
    q: Array, k: Array, v: Array, beta: Array, decay: Array, valid: Array, memory: Array
) -> tuple[Array, Array]:
    """The delta rule (see `mkc.ir.ops.DeltaRule`) over T rows, chunk by chunk, in f32.

    With d the running sum of log decays in a chunk and D[i, j] = exp(d_i - d_j) for j <= i, the
    corrections v' of all rows solve one unit lower triangular system, (I + tril(beta k k^T D, -1))
    v' = beta (v - e^d k S). Then o = e^d q S + (q k^T D) v' and S <- e^d_last S + (e^(d_last - d)
    k)^T v'. A decay of each key channel scales the rows of S, and stands inside the sums over
    channels of k k^T and q k^T.

    Args:
      q, k: [L, T, key heads, dk].
      v: [L, T, value heads, dv].
      beta: [L, T, value heads].
      decay: [L, T, value heads] or [L, T, value heads, dk].
      valid: bool [L, T]; rows without it change nothing.
      memory: f32 [L, value heads, dk, dv].

    Returns:
      o f32 like v, and the new memory.
    """
    rows = q.shape[1]
    most = min(DELTA_CHUNK if decay.ndim == beta.ndim else CHANNEL_CHUNK, rows)
    chunk = max(size for size in range(1, most + 1) if rows % size == 0)

    def counted(x: Array) -> Array:
        return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), wide(x), 0.0)

    q, k, v, beta, decay = map(counted, (q, k, v, beta, decay))

    def pieces(x: Array) -> Array:
        """[L, T, heads, ...] -> [T / chunk, L, heads, chunk, ...]."""
        split = x.reshape(x.shape[0], rows // chunk, chunk, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(split, 1, 0), 3, 2)

    def step(memory: Array, piece: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array]:
        return _delta_chunk(*piece, memory)

    changed, out = lax.scan(
        step, memory, (pieces(q), pieces(k), pieces(v), pieces(beta), pieces(decay))
    )
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1).reshape(v.shape)
    # A sum with zero may change the sign of a zero; nothing must change where no row counts.
    return out, jnp.where(jnp.any(valid, axis=1)[:, None, None, None], changed, memory)


def _delta_chunk(
    q: Array, k: Array, v: Array, beta: Array, decay: Array, memory: Array
) -> tuple[Array, Array]:
    """One chunk of C rows; q, k, v [L, heads, C, dim], beta [L, value heads, C], decay like beta or
    [L, value heads, C, dk].
    """
    group = v.shape[1] // q.shape[1]
    chunk = q.shape[2]
    total = jnp.cumsum(decay.reshape(*beta.shape, -1), axis=2)  # [..., C, 1 or dk]
    row, column = jnp.arange(chunk)[:, None], jnp.arange(chunk)[None, :]
    difference = total[..., :, None, :] - total[..., None, :, :]
    # Masked before the exponential, which overflows for rows still to come.
    seen = (row >= column)[..., None]
    kept = jnp.where(seen, jnp.exp(jnp.where(seen, difference, 0.0)), 0.0)

    def product(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=HIGHEST)

    def per_value_head(x: Array) -> Array:
        return jnp.repeat(x, group, axis=1)

    keys, queries = per_value_head(k), per_value_head(q)

    def likeness(x: Array, scale: Array | float = 1.0) -> Array:
        """`scale` times products of x [L, key heads, C, dk] with the keys, decayed: [L, value
        heads, C, C].
        """
        if decay.ndim == beta.ndim:
            return scale * per_value_head(product(x, jnp.swapaxes(k, -1, -2))) * kept[..., 0]
        pairs = per_value_head(x)[..., :, None, :] * keys[..., None, :, :]
        return scale * jnp.sum(pairs * kept, axis=-1)

    system = jnp.where(row > column, likeness(k, beta[..., None]), 0.0)
    factor = jnp.exp(total)
    wanted = beta[..., None] * (v - product(keys * factor, memory))
    correction = lax.linalg.triangular_solve(
        system, wanted, left_side=True, lower=True, unit_diagonal=True
    )
    out = product(queries * factor, memory) + product(likeness(q), correction)
    left = jnp.exp(total[..., -1:, :] - total)
    added = product(jnp.swapaxes(keys * left, -1, -2), correction)
    return memory * jnp.exp(total[..., -1, :])[..., None] + added, out


def append_rows(
    cache: Array, new: Array, layer: Array, slots: Array, starts: Array, counts: Array
) -> Array:
    """Writes the first `counts` rows of every lane at its `starts`, in place.

    Args:
      cache: [layers, batch, context, width].
      new: [L, T, width].
      slots: sequence of each lane, i32 [L], as are starts and counts.
    """
    lanes, rows, width = new.shape
    context = cache.shape[2]
    assert rows <= context, f"{rows} rows for a cache of {context} positions"
    for lane in range(lanes):
        # A block of fixed size must lie in the cache; near its end the new rows come later in it.
        first = jnp.minimum(starts[lane], context - rows)
        source = jnp.arange(rows) - (starts[lane] - first)
        mine = (source >= 0) & (source < counts[lane])
        place = (layer, slots[lane], first, 0)
        old = lax.dynamic_slice(cache, place, (1, 1, rows, width))
        moved = new[lane][jnp.clip(source, 0, rows - 1)].astype(cache.dtype)
        cache = lax.dynamic_update_slice(cache, jnp.where(mine[:, None], moved, old), place)
    return cache


def attend(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    slots: Array,
    positions: Array,
    kv_heads: int,
    scale: float,
) -> Array:
    """Causal attention over a cache, tile by tile up to the last position.

    Exponentials are rounded to the cache's dtype for the product with the values, as in the kernel.

    Args:
      q: [L, T, heads, dim].
      keys, values: [layers, batch, context, kv heads * dim], rows of this step included.
      positions: i32 [L, T], negative for padding.

    Returns:
      f32 like q.
    """
    lanes, rows, heads, dim = q.shape
    context, width = keys.shape[2:]
    tile = min(ATTENTION_TILE, context)
    last = jnp.max(positions, axis=1)  # [L]; rows behind it hold anything, also NaN
    queries = q.reshape(lanes, rows, kv_heads, heads // kv_heads, dim).astype(keys.dtype)
    seen_until = jnp.maximum(positions, 0)[:, None, None, :, None]

    def fetch(cache: Array, first: Array) -> Array:
        parts = [
            lax.dynamic_slice(cache, (layer, slots[lane], first, 0), (1, 1, tile, width))
            for lane in range(lanes)
        ]
        return jnp.concatenate(parts, axis=1).reshape(lanes, tile, kv_heads, dim)

    def one_tile(number: Array, carry: Softmax) -> Softmax:
        # The last tile of a context that is no multiple of tiles overlaps the one before.
        first = jnp.minimum(number * tile, context - tile)
        column = first + jnp.arange(tile)
        scores = jnp.einsum(
            "ltgqd,lcgd->lgqtc", queries, fetch(keys, first), preferred_element_type=jnp.float32
        )
        visible = (column <= seen_until) & (column >= number * tile)
        written = (column <= jnp.maximum(last, 0)[:, None])[:, :, None, None]
        value = jnp.where(written, fetch(values, first), 0)

        def mix(weights: Array) -> Array:
            return jnp.einsum(
                "lgqtc,lcgd->lgqtd",
                weights.astype(value.dtype),
                value,
                preferred_element_type=jnp.float32,
            )

        return with_tile(carry, scores * scale, visible, mix)

    shape = (lanes, kv_heads, heads // kv_heads, rows)
    tiles = jnp.max(jnp.maximum(last, 0)) // tile + 1
    _, total, mixed = lax.fori_loop(0, tiles, one_tile, no_tiles((*shape, dim)))
    # [L, kv heads, group, T, dim] -> [L, T, heads, dim]
    return jnp.moveaxis(mixed / total, 3, 1).reshape(lanes, rows, heads, dim)


def no_tiles(shape: tuple[int, ...]) -> Softmax:
    """Before the first tile; `shape` is that of the result."""
    single = (*shape[:-1], 1)
    maximum = jnp.full(single, MASKED, jnp.float32)
    return maximum, jnp.zeros(single, jnp.float32), jnp.zeros(shape, jnp.float32)


def with_tile(
    carry: Softmax, scores: Array, visible: Array, mix: Callable[[Array], Array]
) -> Softmax:
    """A softmax over positions, with those of one more tile.

    Args:
      scores: f32 [..., rows, tile].
      visible: bool like scores.
      mix: weights like scores -> their sum of the tile's values, [..., rows, dim].
    """
    maximum, total, mixed = carry
    scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(visible, jnp.exp(scores - new_maximum), 0.0)
    correction = jnp.exp(maximum - new_maximum)
    return (
        new_maximum,
        total * correction + jnp.sum(weights, axis=-1, keepdims=True),
        mixed * correction + mix(weights),
    )


def gathered(part: Array, ranks: int) -> Array:
    """Columns [rows, n] of so many adjoining ranks side by side, [rows, ranks * n]."""
    parts = lax.all_gather(part, AXIS)  # [all ranks, rows, n]
    first = lax.axis_index(AXIS) // ranks * ranks
    own: Array = lax.dynamic_slice_in_dim(parts, first, ranks)
    return jnp.moveaxis(own, 0, 1).reshape(part.shape[0], -1)


def sum_over_ranks(partial: Array, ranks: int, dtype: jnp.dtype) -> Array:
    """Sum of f32 [rows, n] over the ranks in rank order, rounded once; the same bits everywhere.

    Every rank sums its share of the columns and passes the rounded sums on, which moves a fifth of
    what passing all partial sums to all ranks does.
    """
    columns = partial.shape[1]
    if columns % ranks:
        parts = lax.all_gather(partial, AXIS)
        return _in_order(parts).astype(dtype)
    shares = partial.reshape(partial.shape[0], ranks, columns // ranks)
    mine = lax.all_to_all(shares, AXIS, split_axis=1, concat_axis=0, tiled=False)
    total: Array = lax.all_gather(_in_order(mine).astype(dtype), AXIS, axis=1, tiled=True)
    return total


def own_columns(total: Array, columns: int, group: int) -> Array:
    """[rows, m + n] -> [rows, m + n / group]: of the last n columns this rank's share.

    Of `group` adjoining ranks the first has the first share, and so on.
    """
    whole, share = total.shape[1] - columns, columns // group
    first = whole + lax.axis_index(AXIS) % group * share
    own = lax.dynamic_slice_in_dim(total, first, share, axis=1)
    return jnp.concatenate([total[:, :whole], own], axis=1)


def _in_order(parts: Array) -> Array:
    """Sum over the first axis, first to last."""
    total: Array = parts[0]
    for rank in range(1, parts.shape[0]):
        total = total + parts[rank]
    return total


def argmax_over_ranks(x: Array) -> Array:
    """Index of the largest of all ranks' columns, the lowest on ties: [rows, n] -> i32 [rows]."""
    best = jnp.argmax(x, axis=-1)
    largest = lax.all_gather(jnp.max(x, axis=-1), AXIS)  # [ranks, rows]
    index = lax.all_gather(best + lax.axis_index(AXIS) * x.shape[1], AXIS)
    rank = jnp.argmax(largest, axis=0)
    return jnp.take_along_axis(index, rank[None], axis=0)[0].astype(jnp.int32)


def tape_product(
    x: Array, tape: Array, row: Array, *, blocks: int, granule: int, strided: bool
) -> Array:
    """x [rows, K] times the matrix of `blocks` column blocks at tape row `row`.

    Args:
      tape: [tape rows, lanes].
      granule: divides `row`, K and the tape's rows.
      strided: as a convolution of stride K / granule over the tape seen as [.., granule, lanes].
        The TPU compiler reads the matrix where it lies then; the plain form makes it copy every
        matrix first, since it cannot look through the change of shape behind the slice.

    Returns:
      f32 [rows, blocks * lanes].
    """
    rows, K = x.shape
    lanes = tape.shape[1]
    if not strided:
        matrix = lax.dynamic_slice(tape, (row, 0), (blocks * K, lanes))
        return contract("rk,bkn->rbn", x, matrix.reshape(blocks, K, lanes)).reshape(rows, -1)
    pieces = K // granule
    view = tape.reshape(-1, granule, lanes)
    matrix = lax.dynamic_slice(view, (row // granule, 0, 0), (blocks * pieces, granule, lanes))
    # The tape is the image: its pieces are positions, its rows channels, its lanes the batch; the
    # rows of x are filters as long as one column block.
    filters = x.reshape(rows, pieces, granule).transpose(1, 2, 0)
    form = lax.ConvDimensionNumbers((2, 1, 0), (2, 1, 0), (2, 1, 0))
    product = lax.conv_general_dilated(
        matrix,
        filters.astype(tape.dtype),
        (pieces,),
        "VALID",
        dimension_numbers=form,
        preferred_element_type=jnp.float32,
    )
    return jnp.moveaxis(product, 0, 1).reshape(rows, -1)


def contract(form: str, x: Array, weight: Array) -> Array:
    """An einsum with exact products and sums in f32."""
    if x.dtype != weight.dtype:
        x, weight = wide(x), wide(weight)
    exact = HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(form, x, weight, precision=exact, preferred_element_type=jnp.float32)
