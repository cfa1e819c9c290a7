"""Acceptance of drafts by speculative rejection sampling; see `mkc.ir.acceptance`.

Logits stay divided over the ranks. One exchange gives every rank the largest logits of each row,
which say what the filters keep (`distribution`), and so how many drafts are accepted. Then each
rank races its own columns of the row behind them (`race`), and a second exchange finds the winner.

A row that is needed and not decided stops its sequence: it emits nothing. Whoever gets the results
decides from the logits, and says what the same round is to emit when it is run again (`forced`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support import random
from mkc.codegen_pallas.support.accept import NO_TOKEN
from mkc.codegen_pallas.support.accept import each_sequence
from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.argmax import store_tokens
from mkc.codegen_pallas.support.distribution import MANY
from mkc.codegen_pallas.support.distribution import Cut
from mkc.codegen_pallas.support.distribution import Filters
from mkc.codegen_pallas.support.distribution import Sampling
from mkc.codegen_pallas.support.distribution import column
from mkc.codegen_pallas.support.distribution import filters_of
from mkc.codegen_pallas.support.distribution import find_cut
from mkc.codegen_pallas.support.distribution import keeps
from mkc.codegen_pallas.support.exchange import AXIS
from mkc.codegen_pallas.support.exchange import peers_of
from mkc.codegen_pallas.support.exchange import send_to
from mkc.codegen_pallas.support.race import Runner
from mkc.codegen_pallas.support.race import Times
from mkc.codegen_pallas.support.race import chunks
from mkc.codegen_pallas.support.race import load_chunk
from mkc.codegen_pallas.support.race import over_columns
from mkc.codegen_pallas.support.race import race
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.vector import join
from mkc.ir.counter_random import ACCEPT

STEP = 4 * LANES  # columns per step of the sum
ACCEPTED, DECIDED = 1, 2  # bits of what is known of a row
LOWEST = -3.4028234663852886e38  # the least finite number of f32


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Buffers and semaphores of an exchange of one message; alternate as in `all_reduce_one_shot`.

    Attributes:
      send: `[n, 128]` i32 in VMEM.
      receive: `[ranks, n, 128]` i32 in VMEM.
    """

    send: Ref
    receive: Ref
    send_sem: Ref
    receive_sem: Ref


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The draft behind each row, which is the token of the next row.

    Attributes:
      token: `[R, 128]` i32, all lanes alike; -1 where no draft is.
      candidates, proposal: `[R, 128]` i32 and f32: tokens that it was drawn from and their
        probabilities, in the first `count` lanes; zeros where no draft is.
    """

    token: jax.Array
    candidates: jax.Array
    proposal: jax.Array
    count: int


def accept_sampled(
    logits: View,
    values: jax.Array,
    ids: jax.Array,
    *,
    listed: int,
    columns: int,
    ranks: int,
    sampling: Sampling,
    proposal: tuple[View, View] | None,
    first: Exchange | None,
    second: Exchange | None,
    tokens: Ref,
    positions: Ref,
    forced: Ref,
    emitted: Ref,
    count: Ref,
    last: Ref,
    batch: int,
    rows_per_sequence: int,
) -> None:
    """Accepts drafts, then draws one token more.

    Args:
      logits: `[R, n]` f32, from a whole register on.
      values, ids: `[R, 128]`, `local_top_k(logits, listed, columns)`.
      listed: logits of each rank that all ranks look at, at most `columns` and 128 / ranks.
      columns: of this rank that count.
      proposal: candidates `[R, K]` i32 and their probabilities `[R, K]` f32; None for drafts that
        are certain.
      first, second: with messages of 3 * R rows and of twice as many rows as the batch rounded up
        to 8; None for one rank.
      tokens, positions: `[batch * T]` i32 in SMEM.
      forced: `[batch * T]` i32 in SMEM: what a sequence emits whatever its logits say, and -1
        behind that.
      emitted: `[batch * T]` i32 in SMEM, `NO_TOKEN` behind the tokens.
      count, last: `[batch]` i32 in SMEM: number of tokens and the last one; 0 and `NO_TOKEN` for a
        sequence that rests or is not decided.
    """
    rows, length = values.shape[0], rows_per_sequence
    filters = filters_of(sampling, rows, batch, length)
    drafts = _drafts(tokens, positions, proposal, rows, batch, length)
    first_id = 0 if ranks == 1 else lax.axis_index(AXIS) * columns
    sums = _column_sums(logits, values, filters, drafts.token - first_id, columns)
    parts = _swap(first, jnp.concatenate([_bits(values), ids + first_id, _bits(sums)]), ranks)
    values, ids, mass, draft_logit = _joined(parts, filters, listed)
    cut = find_cut(values, ids, mass, filters, listed=listed, ranks=ranks, columns=columns)

    chance = jnp.exp((draft_logit - cut.peak) / filters.heat) / cut.mass
    chance = jnp.where(keeps(draft_logit, drafts.token, cut.value, cut.id), chance, 0.0)
    lucky = _uniform(sampling.seed, positions, rows, batch, length) * _of_draft(drafts) < chance
    flags = jnp.where((drafts.token >= 0) & lucky, ACCEPTED, 0)
    store_tokens(flags + jnp.where(cut.decided, DECIDED, 0), emitted, batch * length)
    _count(positions, emitted, count, batch, length)

    times = _races(
        logits, cut, filters, drafts, sampling.seed, positions, count, columns, first_id, length
    )
    _finish(_swap(second, times, ranks), last, batch)
    _emit(tokens, positions, forced, emitted, count, last, batch, length)


def _drafts(
    tokens: Ref,
    positions: Ref,
    proposal: tuple[View, View] | None,
    rows: int,
    batch: int,
    length: int,
) -> Drafts:
    """What stands in the next row, for every row."""
    found: list[Scalar] = []
    for row in range(batch * length):
        if row % length == length - 1:
            found.append(jnp.int32(NO_TOKEN))
        else:
            found.append(jnp.where(positions[row + 1] >= 0, tokens[row + 1], NO_TOKEN))
    if batch * length < rows:
        found.append(jnp.int32(NO_TOKEN))
    token = column(found, rows)
    if proposal is None:
        lane = lax.broadcasted_iota(jnp.int32, token.shape, 1)
        certain = jnp.where((lane == 0) & (token >= 0), 1.0, 0.0)
        return Drafts(token=token, candidates=token, proposal=certain, count=1)
    candidates, chances = (pltpu.roll(_whole(one.load()), rows - 1, 0) for one in proposal)
    return Drafts(
        token=token,
        candidates=candidates,
        proposal=jnp.where(token >= 0, chances, 0.0),
        count=proposal[0].width,
    )


def _whole(value: jax.Array) -> jax.Array:
    """Fewer lanes than a register has, and zeros behind them."""
    padding = LANES - value.shape[1]
    return join([value, jnp.zeros((value.shape[0], padding), value.dtype)]) if padding else value


def _of_draft(drafts: Drafts) -> jax.Array:
    """The probability `[R, 1]` that each row's draft was drawn with."""
    mine = drafts.candidates == drafts.token
    return jnp.sum(jnp.where(mine, drafts.proposal, 0.0), axis=1, keepdims=True)


def _uniform(seed: Ref, positions: Ref, rows: int, batch: int, length: int) -> jax.Array:
    """The random number of the token behind each row, `[R, 128]`, all lanes alike."""
    low, high = (
        column([seed[2 * sequence + word] for sequence in range(batch)], rows, repeats=length)
        for word in range(2)
    )
    places = [positions[row - row % length] + row % length + 1 for row in range(batch * length)]
    return random.uniform((low, high), column(places, rows), ACCEPT, 0)


def _column_sums(
    logits: View, values: jax.Array, filters: Filters, draft: jax.Array, columns: int
) -> jax.Array:
    """Of this rank's columns `[R, 128]`: lane 0 has the sum of exp((logit - largest) / heat), the
    other lanes the logit of column `draft`, minus infinity where no column is that.
    """
    # Of tokens that are not allowed the logit is minus infinity; perhaps no other is here.
    largest = jnp.maximum(values[:, :1], LOWEST)
    lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)

    def step(start: Scalar, size: int, carry: Times) -> Times:
        mass, found = carry
        for begin, length in chunks(size):
            value = load_chunk(logits, slice(None), start + begin, length)
            place = lane + start + begin
            there = place < columns
            mass = mass + jnp.where(there, jnp.exp((value - largest) / filters.heat), 0.0)
            found = jnp.where(there & (place == draft), value, found)
        return mass, found

    nothing = jnp.zeros(values.shape, jnp.float32)
    mass, found = over_columns(
        logits.width, STEP, step, (nothing, jnp.full_like(nothing, -jnp.inf))
    )
    mass = jnp.sum(mass, axis=1, keepdims=True)
    return jnp.where(lane == 0, mass, jnp.max(found, axis=1, keepdims=True))


def _swap(exchange: Exchange | None, message: jax.Array, ranks: int) -> list[jax.Array]:
    """The messages `[n, 128]` i32 of all ranks, in their order."""
    if exchange is None:
        return [message]
    me = lax.axis_index(AXIS)
    exchange.send[...] = message
    copies = [
        send_to(
            exchange.send, exchange.receive.at[me], exchange.send_sem, exchange.receive_sem, peer
        )
        for peer in peers_of(ranks)
    ]
    for copy in copies:
        copy.start()
    exchange.receive[me] = message
    for copy in copies:
        copy.wait_recv()
    messages = [exchange.receive[rank] for rank in range(ranks)]
    for copy in copies:
        copy.wait_send()
    return messages


def _joined(
    parts: list[jax.Array], filters: Filters, listed: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The list of all ranks, the sum over all columns and the draft's logit: `[R, 128]` each."""
    rows = parts[0].shape[0] // 3
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    values, ids = jnp.full(lane.shape, -jnp.inf, jnp.float32), jnp.full(lane.shape, MANY)
    for rank, part in enumerate(parts):
        mine = (lane >= rank * listed) & (lane < (rank + 1) * listed)
        turned = [
            pltpu.roll(one, rank * listed, 1) if rank else one
            for one in (_numbers(part[:rows]), part[rows : 2 * rows])
        ]
        values, ids = jnp.where(mine, turned[0], values), jnp.where(mine, turned[1], ids)
    peak = jnp.max(values, axis=1, keepdims=True)
    mass = jnp.zeros(lane.shape, jnp.float32)
    draft_logit = jnp.full(lane.shape, -jnp.inf, jnp.float32)
    for part in parts:
        largest, sums = _numbers(part[:rows])[:, :1], _numbers(part[2 * rows :])
        mass = mass + sums[:, :1] * jnp.exp((largest - peak) / filters.heat)
        draft_logit = jnp.maximum(draft_logit, sums[:, 1:2])
    return values, ids, mass, draft_logit


def _count(positions: Ref, flags: Ref, count: Ref, batch: int, length: int) -> None:
    """`count` `[batch]`: accepted drafts and 1, or 0 for a sequence that emits nothing."""

    def one_sequence(sequence: jax.Array) -> None:
        first = sequence * length
        going = awake = positions[first] >= 0
        stuck = jnp.bool_(False)
        number = jnp.int32(0)
        for row in range(length):
            flag = flags[first + row]
            stuck = stuck | (going & (flag < DECIDED))
            going = going & (flag == ACCEPTED + DECIDED)
            number = number + going.astype(jnp.int32)
        count[sequence] = jnp.where(awake & ~stuck, number + 1, 0)

    each_sequence(batch, one_sequence)


def _races(
    logits: View,
    cut: Cut,
    filters: Filters,
    drafts: Drafts,
    seed: Ref,
    positions: Ref,
    count: Ref,
    columns: int,
    first_id: Scalar,
    length: int,
) -> jax.Array:
    """Winners of this rank as a message: for sequence s, times in row s, then ids.

    Lane 0 is for what p has more than q, the other lanes for p.
    """
    batch = count.shape[0]
    height = -(-batch // SUBLANES) * SUBLANES
    row_of = lax.broadcasted_iota(jnp.int32, filters.heat.shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, (height, LANES), 1)
    sequences = lax.broadcasted_iota(jnp.int32, (height, LANES), 0)

    def one_sequence(sequence: jax.Array, carry: Times) -> Times:
        first = sequence * length
        accepted = jnp.maximum(count[sequence] - 1, 0)

        def chosen(values: jax.Array) -> jax.Array:
            mine = row_of == first + accepted
            return jnp.sum(jnp.where(mine, values, 0), axis=0, keepdims=True)

        runner = Runner(
            row=first + accepted,
            seed=(seed[2 * sequence], seed[2 * sequence + 1]),
            position=positions[first] + accepted + 1,
            heat=chosen(filters.heat),
            peak=chosen(cut.peak),
            mass=chosen(cut.mass),
            last_value=chosen(cut.value),
            last_id=chosen(cut.id),
            candidates=chosen(drafts.candidates),
            proposal=chosen(drafts.proposal),
            count=drafts.count,
        )
        rest, target = race(logits, runner, columns=columns, first_id=first_id)
        mine = sequences == sequence
        times, ids = (
            jnp.where(mine, jnp.where(lane == 0, one, other), before)
            for one, other, before in zip(rest, target, carry, strict=True)
        )
        return times, ids

    nobody = (jnp.full(lane.shape, jnp.inf, jnp.float32), jnp.full(lane.shape, MANY))
    times, ids = lax.fori_loop(0, batch, one_sequence, nobody)
    return jnp.concatenate([_bits(times), ids])


def _finish(parts: list[jax.Array], last: Ref, batch: int) -> None:
    """The token that wins over all ranks, for every sequence; the lowest id on ties."""
    height = parts[0].shape[0] // 2
    times, ids = _numbers(parts[0][:height]), parts[0][height:]
    for part in parts[1:]:
        other = _numbers(part[:height])
        better = other < times  # ids grow with the ranks
        times, ids = jnp.where(better, other, times), jnp.where(better, part[height:], ids)
    store_tokens(jnp.where(times[:, :1] < jnp.inf, ids[:, :1], ids[:, 1:2]), last, batch)


def _emit(
    tokens: Ref,
    positions: Ref,
    forced: Ref,
    emitted: Ref,
    count: Ref,
    last: Ref,
    batch: int,
    length: int,
) -> None:
    """Accepted drafts and the token behind them; or what is forced."""

    def one_sequence(sequence: jax.Array) -> None:
        first = sequence * length
        given = (forced[first] >= 0) & (positions[first] >= 0)
        number = jnp.where(given, real_rows(forced, sequence, length), count[sequence])
        drawn, newest = last[sequence], jnp.int32(NO_TOKEN)
        for row in range(length):
            token = drawn
            if row + 1 < length:
                token = jnp.where(row + 1 < number, tokens[first + row + 1], drawn)
            token = jnp.where(given, forced[first + row], token)
            token = jnp.where(row < number, token, NO_TOKEN)
            emitted[first + row] = token
            newest = jnp.where(row + 1 == number, token, newest)
        count[sequence], last[sequence] = number, newest

    each_sequence(batch, one_sequence)


def _bits(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def _numbers(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
