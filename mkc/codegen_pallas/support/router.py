"""The choice of experts: the largest scores of every row, and which experts to load for all rows.

Comparisons of everything with everything take the place of a search for one after the other: they
do not wait for each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import sigmoid
from mkc.ir.ops_experts import NORM_EPS
from mkc.ir.ops_experts import RouterScore
from mkc.schedule.expert_store import COUNT


def route(
    logits: View,
    bias: jax.Array | None,
    *,
    ids: View,
    weights: View,
    places: Ref,
    landing: Ref,
    chosen: Ref,
    sem: Ref,
    rows: int,
    k: int,
    score: RouterScore,
    renormalise: bool,
    factor: float,
    first: Scalar,
    local: int,
) -> None:
    """Chooses `k` experts for every row, and lists those of this rank; see `mkc.ir.ops_experts`.

    Ids are in range whatever the logits are.

    Args:
      logits: `[R, E]` f32.
      bias: `[1, E]` f32, added to the scores for the choice only.
      ids: `[R, k]` in an i32 buffer, in descending order of what was compared, the lowest first on
        ties.
      weights: `[R, k]` f32.
      places: `[R, E]` f32 in VMEM.
      landing: `[8, n]` i32 in VMEM, n = `rows * k` rounded up to 128.
      chosen: `[8, n]` i32 in SMEM. In row `CHOSEN` stand id - first of the distinct experts that
        one of the first `rows` rows chose, ascending; element 0 of row `COUNT` is their number.
      sem: a DMA semaphore.
      first: the first expert of this rank, which may be a run-time value.
      local: experts of this rank.
    """
    values = logits.load()
    if score is RouterScore.SIGMOID:
        scores = sigmoid(values)
    else:
        powers = jnp.exp(values - jnp.max(values, axis=1, keepdims=True))
        scores = powers / jnp.sum(powers, axis=1, keepdims=True)
    compared = scores if bias is None else scores + bias
    places[...] = compared
    _rank_rows(places, rows)
    place = places[...]
    number = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    found, parts = [], []
    for index in range(k):
        here = place == index
        found.append(jnp.max(jnp.where(here, number, 0), axis=1, keepdims=True))
        parts.append(jnp.sum(jnp.where(here, scores, 0.0), axis=1, keepdims=True))
    ids.store(join(found))
    part = join(parts)
    if renormalise:
        part = part / (jnp.sum(part, axis=1, keepdims=True) + NORM_EPS)
    weights.store(part * factor)
    _list_chosen(found, landing, rows=rows, first=first, local=local)
    copy = pltpu.make_async_copy(landing, chosen, sem)
    copy.start()
    copy.wait()


def _down(row: jax.Array) -> jax.Array:
    """`[1, n]` as `[n, 128]` whose every column is the vector."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def _rank_rows(numbers: Ref, rows: int) -> None:
    """Replaces each number of the first `rows` rows by how many of its row come before it.

    Args:
      numbers: `[R, n]` f32.
    """
    width = numbers.shape[1]
    view = View(ref=numbers, start=0, width=width)

    def one_row(row: Scalar) -> None:
        view.store_row(row, _ranks(view.row(row)))

    if rows == 1:
        one_row(0)
        return

    def step(row: jax.Array, carry: jax.Array) -> jax.Array:
        one_row(row)
        return carry

    lax.fori_loop(0, rows, step, jnp.int32(0))


def _ranks(x: jax.Array) -> jax.Array:
    """Of `[1, n]`: how many come before each, that is larger ones and equal ones to the left."""
    width = x.shape[1]
    missing = -width % LANES
    if missing:
        x = join([x, jnp.full((1, missing), -jnp.inf, jnp.float32)])
    lane = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    line = lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    starts = range(0, x.shape[1], LANES)
    downs = [_down(x[:, start : start + LANES]) for start in starts]
    found = []
    for start in starts:
        across = jnp.broadcast_to(x[:, start : start + LANES], (LANES, LANES))
        total = jnp.zeros((LANES, LANES), jnp.float32)
        for other, down in zip(starts, downs, strict=True):
            if other < start:
                before = down >= across
            elif other > start:
                before = down > across
            else:
                before = (down > across) | ((down == across) & (line < lane))
            total = total + jnp.where(before, 1.0, 0.0)
        found.append(jnp.sum(total, axis=0, keepdims=True))
    return join(found)[:, :width]


def _list_chosen(
    ids: list[jax.Array], landing: Ref, *, rows: int, first: Scalar, local: int
) -> None:
    """Lists the distinct experts of this rank in `landing`; ids are `[R, 1]` for each choice."""
    begin = jnp.asarray(first, jnp.int32).astype(jnp.float32)
    across = _in_one_row(ids, rows, landing.shape[1])
    size = across.shape[1]
    down = _down(across)
    line = lax.broadcasted_iota(jnp.int32, (size, LANES), 0)
    lane = lax.broadcasted_iota(jnp.int32, (size, LANES), 1)
    lists = []
    mine = (down >= begin) & (down < begin + local)
    for start in range(0, size, LANES):
        here = jnp.broadcast_to(across[:, start : start + LANES], down.shape)
        same = jnp.where((down == here) & (line < lane + start), 1.0, 0.0)
        own = (here[0:1] >= begin) & (here[0:1] < begin + local)
        lists.append(jnp.where(own & (jnp.sum(same, axis=0, keepdims=True) == 0), 1.0, 0.0))
    counts = join(lists)  # 1 for the first of equal ids of this rank
    counts_down = _down(counts)
    place = jnp.zeros((size, LANES), jnp.float32)
    for start in range(0, size, LANES):
        here = jnp.broadcast_to(across[:, start : start + LANES], down.shape)
        counted = jnp.broadcast_to(counts[:, start : start + LANES], down.shape)
        smaller = jnp.where(here < down, counted, 0.0)
        place = place + jnp.broadcast_to(jnp.sum(smaller, axis=1, keepdims=True), place.shape)
    entries = []
    for start in range(0, size, LANES):
        goes_here = (place == (lane + start).astype(jnp.float32)) & (counts_down > 0) & mine
        entry = jnp.where(goes_here, down - begin, 0.0)
        entries.append(jnp.sum(entry, axis=0, keepdims=True).astype(jnp.int32))
    number = jnp.sum(counts, axis=1, keepdims=True).astype(jnp.int32)
    rest = jnp.zeros((SUBLANES - COUNT - 1, size), jnp.int32)
    landing[...] = jnp.concatenate(
        [join(entries), jnp.broadcast_to(number, (1, size)), rest], axis=0
    )


def _in_one_row(ids: list[jax.Array], rows: int, size: int) -> jax.Array:
    """Ids of the first `rows` rows, as f32 numbers, behind one another: `[1, size]`, then -1."""
    lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
    found = jnp.full((1, size), -1.0, jnp.float32)
    for choice, one in enumerate(ids):
        for row in range(rows):
            value = one[row : row + 1].astype(jnp.float32)
            found = jnp.where(lane == choice * rows + row, value, found)
    return found
