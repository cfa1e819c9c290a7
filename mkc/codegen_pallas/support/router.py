"""The choice of experts: the largest scores of every row, and which experts to load for all rows.

Comparisons of everything with everything take the place of a search for one after the other: they
do not wait for each other.
"""

from __future__ import annotations

import functools

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
    space: Ref | None,
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
      space: `[R, E]` f32 in VMEM for more rows than a register has; else None.
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
    if rows == 1:
        found, part = _largest_of_row(compared, scores, k)
    else:
        found = _largest(compared, k) if space is None else _largest_of_blocks(compared, space, k)
        part = _take(scores, found.astype(jnp.int32))[:, :k]
    ids.store(found[:, :k].astype(jnp.int32))
    if renormalise:
        part = part / (jnp.sum(part, axis=1, keepdims=True) + NORM_EPS)
    weights.store(part * factor)
    _list_chosen(found, landing, rows=rows, k=k, first=first, local=local)
    copy = pltpu.make_async_copy(landing, chosen, sem)
    copy.start()
    copy.wait()


def _down(row: jax.Array) -> jax.Array:
    """`[1, n]` as `[n, 128]` whose every column is the vector."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def _largest_of_row(x: jax.Array, scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`_largest` of the first row, in all rows, and its scores, `[R, k]`.

    Registers are full of one row's numbers when all are compared with all; and nothing is fetched
    from another lane, which takes long, where everything else waits for it.
    """
    rank = jnp.broadcast_to(_ranks_of_row(x[:1]), x.shape)
    ranks = _registers(_whole(rank, float(x.shape[1])))
    numbers = [_lane(ranks[0], index * LANES) for index in range(len(ranks))]
    return _sorted(numbers, ranks, k), _sorted(_registers(_whole(scores, 0.0)), ranks, k)[:, :k]


def _ranks_of_row(x: jax.Array) -> jax.Array:
    """Of `[1, n]`: how many come before each, that is larger ones and equal ones to the left."""
    width = x.shape[1]
    x = _whole(x, -jnp.inf)
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


def _largest_of_blocks(x: jax.Array, space: Ref, k: int) -> jax.Array:
    """`_largest` of more rows than a register has, a register of rows after the other."""
    space[...] = x
    view = View(ref=space, start=0, width=x.shape[1])

    def step(block: jax.Array, carry: jax.Array) -> jax.Array:
        found = _largest(view.rows(block, SUBLANES), k)
        view.lanes(0, k).store_rows(block, found[:, :k])
        return carry

    lax.fori_loop(0, x.shape[0] // SUBLANES, step, jnp.int32(0))
    return _whole(view.lanes(0, k).load(), 0.0)


def _largest(x: jax.Array, k: int) -> jax.Array:
    """Numbers of the `k` largest of every row of `[R, n]`, the largest first, `[R, m]`.

    The lowest number comes first on ties; NaN counts as minus infinity. m is `k` rounded up to 128,
    and the rest is 0.
    """
    whole = _whole(jnp.where(x == x, x, -jnp.inf), -jnp.inf)
    values = _registers(whole)
    numbers = [_lane(values[0], index * LANES) for index in range(len(values))]
    count = x.shape[1]
    if len(values) > 1 and k < LANES:
        count = k * len(values)
        values, numbers = _candidates(values, k)
    return _sorted(numbers, _ranks(values, numbers, count), k)


def _candidates(values: list[jax.Array], k: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """All numbers that may be among the `k` largest: of `k` lanes.

    The largest number of each lane stands for it. A lane behind `k` others has `k` numbers of these
    before all of its own.
    """
    best, column = values[0], jnp.zeros_like(values[0])
    for index in range(1, len(values)):
        better = values[index] > best
        best = jnp.where(better, values[index], best)
        column = jnp.where(better, float(index), column)
    lane = _lane(best, 0)
    ranks = _ranks([best], [column * LANES + lane], LANES)
    lanes = _sorted([lane], ranks, k).astype(jnp.int32)
    found, numbers = [], []
    for start in range(0, k * len(values), LANES):
        column, slot = _divided(best, start, k)
        source = _take(lanes, slot)
        value = jnp.full_like(best, -jnp.inf)
        for index in range(start // k, min(len(values), (start + LANES - 1) // k + 1)):
            value = jnp.where(column == index, _take(values[index], source), value)
        found.append(value)
        numbers.append((column * LANES + source).astype(jnp.float32))
    return found, numbers


def _ranks(values: list[jax.Array], numbers: list[jax.Array], count: int) -> list[jax.Array]:
    """How many of the first `count` come before each: larger ones, equal ones of lower number.

    Args:
      values: registers `[R, 128]`, as are `numbers` and the result.
    """
    ranks = [jnp.zeros_like(one) for one in values]
    for other in range(count):
        index, lane = divmod(other, LANES)
        value = jnp.broadcast_to(values[index][:, lane : lane + 1], values[0].shape)
        number = jnp.broadcast_to(numbers[index][:, lane : lane + 1], values[0].shape)
        for here, rank in enumerate(ranks):
            equal = (value == values[here]) & (number < numbers[here])
            ranks[here] = rank + jnp.where((value > values[here]) | equal, 1.0, 0.0)
    return ranks


def _sorted(what: list[jax.Array], ranks: list[jax.Array], k: int) -> jax.Array:
    """`what` of rank 0 .. k - 1 in this order, then 0: `[R, m]`, m = `k` rounded up to 128."""
    pieces = []
    for start in range(0, k, LANES):
        lane = _lane(what[0], start)
        piece = jnp.zeros_like(what[0])
        for rank in range(start, min(k, start + LANES)):
            parts = [jnp.where(at == rank, one, 0.0) for at, one in zip(ranks, what, strict=True)]
            found = jnp.max(functools.reduce(jnp.maximum, parts), axis=1, keepdims=True)
            piece = jnp.where(lane == rank, found, piece)
        pieces.append(piece)
    return join(pieces)


def _whole(x: jax.Array, fill: float) -> jax.Array:
    """`[R, n]` with whole registers of lanes."""
    missing = -x.shape[1] % LANES
    return join([x, jnp.full((x.shape[0], missing), fill, x.dtype)]) if missing else x


def _registers(x: jax.Array) -> list[jax.Array]:
    """The lanes of `[R, n]`, 128 at a time."""
    return [x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)]


def _lane(like: jax.Array, start: int) -> jax.Array:
    """`start` + the number of the lane, as f32."""
    return (lax.broadcasted_iota(jnp.int32, like.shape, 1) + start).astype(jnp.float32)


def _divided(like: jax.Array, start: int, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, i32, of `start` + the number of the lane, without a division."""
    position = lax.broadcasted_iota(jnp.int32, like.shape, 1) + start
    quotient = jnp.full(like.shape, start // divisor, jnp.int32)
    for step in range(start // divisor + 1, (start + LANES - 1) // divisor + 1):
        quotient = quotient + jnp.where(position >= step * divisor, 1, 0)
    return quotient, position - quotient * divisor


def _take(x: jax.Array, lane: jax.Array) -> jax.Array:
    """Of every row of `[R, n]` the elements in lanes `lane` `[R, m]` i32, m a multiple of 128."""
    pieces = []
    for wanted in _registers(lane):
        piece = jnp.zeros(wanted.shape, x.dtype)
        inside = wanted & (LANES - 1)
        for index, register in enumerate(_registers(_whole(x, 0))):
            taken = jnp.take_along_axis(register, inside, axis=1, mode="promise_in_bounds")
            piece = jnp.where(wanted >= index * LANES, taken, piece)
        pieces.append(piece)
    return join(pieces)


def _list_chosen(
    ids: jax.Array, landing: Ref, *, rows: int, k: int, first: Scalar, local: int
) -> None:
    """Lists the distinct experts of this rank in `landing`; ids are `[R, n]` f32, `k` of them."""
    begin = jnp.asarray(first, jnp.int32).astype(jnp.float32)
    across = _in_one_row(ids, rows, k)
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


def _in_one_row(ids: jax.Array, rows: int, k: int) -> jax.Array:
    """The first `k` ids of the first `rows` rows behind one another, then -1: `[1, n]`."""
    if rows == 1:
        return jnp.where(_lane(ids[:1], 0) < k, ids[:1], -1.0)
    line = lax.broadcasted_iota(jnp.int32, (ids.shape[0], LANES), 0)
    pieces = []
    for start in range(0, rows * k, LANES):
        row, slot = _divided(line, start, k)
        here = jnp.sum(jnp.where(row == line, _take(ids, slot), 0.0), axis=0, keepdims=True)
        pieces.append(jnp.where(row[0:1] < rows, here, -1.0))
    return join(pieces)
