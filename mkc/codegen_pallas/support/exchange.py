"""Exchanges between the ranks of the mesh axis "tp".

Each waits for its own sends and receives, so every semaphore is zero between exchanges. Sums run in
rank order, which makes all ranks bit-identical. Peers are visited from the farthest rank number to
the sibling core, so that the slow links start first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import round_bf16

AXIS = "tp"


def peers_of(ranks: int) -> list[jax.Array]:
    """All other ranks, in the order of sending.

    With a power of two the order is by exclusive or: at every moment each rank sends to one and
    receives from one, and the sibling core, which differs in the lowest bit, comes last.
    """
    me = lax.axis_index(AXIS)
    distances = range(ranks - 1, 0, -1)
    if ranks & (ranks - 1) == 0:
        return [jnp.bitwise_xor(me, distance) for distance in distances]
    wrapped = [me + distance for distance in distances]
    return [jnp.where(peer >= ranks, peer - ranks, peer) for peer in wrapped]


def send_to(source: Ref, target: Ref, send_sem: Ref, receive_sem: Ref, peer: Any) -> Any:
    return pltpu.make_async_remote_copy(
        src_ref=source,
        dst_ref=target,
        send_sem=send_sem,
        recv_sem=receive_sem,
        device_id={AXIS: peer},
    )


def entry_barrier(ranks: int) -> None:
    """Waits until every rank has entered the kernel. Call before the first remote copy."""
    if ranks == 1:
        return
    barrier = pltpu.get_barrier_semaphore()
    for peer in peers_of(ranks):
        pl.semaphore_signal(barrier, 1, device_id={AXIS: peer})
    pl.semaphore_wait(barrier, ranks - 1)


def all_reduce_one_shot(
    value: jax.Array,
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
    group: int = 1,
    own: int = 0,
) -> jax.Array:
    """The sum of every rank's `value`, `[w, N]` f32 with w 1 or 8; everybody sends to everybody.

    Consecutive exchanges need different `receive` and `receive_sem`, two of each in turn: a rank
    may start the next exchange while a peer still waits in this one, but not the one after it.

    Args:
      send: `[w, N]` f32 in VMEM, N in whole registers; lanes behind those of `value` mean nothing.
      receive: `[ranks, w, N]` f32 in VMEM.
      own: of the last so many columns only the share of this rank's place in its group of `group`
        adjoining ranks is wanted: the result is `[w, N - own + own / group]`.
    """
    if ranks == 1:
        return value
    buffers = {"send": send, "receive": receive, "send_sem": send_sem, "receive_sem": receive_sem}
    all_reduce_one_shot_start(value, **buffers, ranks=ranks)
    return all_reduce_one_shot_finish(value.shape[1], **buffers, ranks=ranks, group=group, own=own)


def all_reduce_one_shot_start(
    value: jax.Array,
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
) -> None:
    """The first half of `all_reduce_one_shot`: messages are on their way when it returns."""
    me = lax.axis_index(AXIS)
    lanes = slice(0, value.shape[1])
    send[:, lanes] = value
    for copy in _to_all(send, receive.at[me], send_sem, receive_sem, ranks):
        copy.start()
    receive[me, :, lanes] = value


def all_reduce_one_shot_finish(
    width: int,
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
    group: int = 1,
    own: int = 0,
) -> jax.Array:
    """The second half of `all_reduce_one_shot`; a partial sum has `width` lanes."""
    me = lax.axis_index(AXIS)
    copies = _to_all(send, receive.at[me], send_sem, receive_sem, ranks)
    for copy in copies:
        copy.wait_recv()
    total = _sum_of(receive, slice(0, width - own), ranks)
    if own:
        share = own // group
        start = width - own + lax.rem(me, jnp.int32(group)) * share
        mine = _sum_of(receive, pl.ds(pl.multiple_of(start, LANES), share), ranks)
        total = join([total, mine])
    for copy in copies:
        copy.wait_send()
    return total


def _sum_of(receive: Ref, lanes: Any, ranks: int) -> jax.Array:
    """In the order of ranks."""
    total: jax.Array = receive[0, :, lanes]
    for rank in range(1, ranks):
        total = total + receive[rank, :, lanes]
    return total


def _to_all(source: Ref, target: Ref, send_sem: Ref, receive_sem: Ref, ranks: int) -> list[Any]:
    return [send_to(source, target, send_sem, receive_sem, peer) for peer in peers_of(ranks)]


def all_reduce_two_phase(
    partial: Ref,
    *,
    parts: Ref | None = None,
    scattered: Ref,
    send: Ref,
    gathered: Ref,
    scatter_send_sem: Ref,
    scatter_receive_sem: Ref,
    gather_send_sem: Ref,
    gather_receive_sem: Ref,
    ranks: int,
) -> jax.Array:
    """The sum of every rank's `partial`, rounded once to bf16, as f32 `[R, N]`.

    Each rank sums one block of N / ranks columns and sends the bf16 result to all. The buffers may
    serve every exchange: a rank sends its gather only after it has read what was scattered to it,
    and its next scatter only after it has read what was gathered.

    Args:
      partial: `[R, N]` f32 in VMEM.
      parts: `[R, N]` bf16 in VMEM; with it partial sums are rounded before they are sent.
      scattered: `[ranks, R, N / ranks]` in VMEM, of the dtype that is sent.
      send: `[R, N / ranks]` bf16 in VMEM.
      gathered: `[ranks, R, N / ranks]` bf16 in VMEM.
    """
    if ranks == 1:
        return round_bf16(partial[...])
    all_reduce_two_phase_start(
        partial,
        parts=parts,
        scattered=scattered,
        scatter_send_sem=scatter_send_sem,
        scatter_receive_sem=scatter_receive_sem,
        ranks=ranks,
    )
    return all_reduce_two_phase_finish(
        partial,
        parts=parts,
        scattered=scattered,
        send=send,
        gathered=gathered,
        scatter_send_sem=scatter_send_sem,
        scatter_receive_sem=scatter_receive_sem,
        gather_send_sem=gather_send_sem,
        gather_receive_sem=gather_receive_sem,
        ranks=ranks,
    )


def all_reduce_two_phase_start(
    partial: Ref,
    *,
    parts: Ref | None = None,
    scattered: Ref,
    scatter_send_sem: Ref,
    scatter_receive_sem: Ref,
    ranks: int,
) -> None:
    """The first half of `all_reduce_two_phase`: `partial` is on its way and must not change."""
    if parts is not None:
        parts[...] = partial[...].astype(parts.dtype)
        partial = parts
    for copy in _scatter(partial, scattered, scatter_send_sem, scatter_receive_sem, ranks):
        copy.start()
    me = lax.axis_index(AXIS)
    scattered[me] = partial[:, _block(partial, me, ranks)]


def _block(partial: Ref, rank: jax.Array, ranks: int) -> Any:
    """The columns that a rank sums."""
    columns = partial.shape[1] // ranks
    start = rank * columns
    return pl.ds(pl.multiple_of(start, LANES) if columns % LANES == 0 else start, columns)


def _scatter(
    partial: Ref, scattered: Ref, send_sem: Ref, receive_sem: Ref, ranks: int
) -> list[Any]:
    """To every peer its columns."""
    target = scattered.at[lax.axis_index(AXIS)]
    return [
        send_to(partial.at[:, _block(partial, peer, ranks)], target, send_sem, receive_sem, peer)
        for peer in peers_of(ranks)
    ]


def all_reduce_two_phase_finish(
    partial: Ref,
    *,
    parts: Ref | None = None,
    scattered: Ref,
    send: Ref,
    gathered: Ref,
    scatter_send_sem: Ref,
    scatter_receive_sem: Ref,
    gather_send_sem: Ref,
    gather_receive_sem: Ref,
    ranks: int,
) -> jax.Array:
    """The second half of `all_reduce_two_phase`, of the same `partial`."""
    me = lax.axis_index(AXIS)
    source = partial if parts is None else parts
    scatter = _scatter(source, scattered, scatter_send_sem, scatter_receive_sem, ranks)
    for copy in scatter:
        copy.wait_recv()
    total: jax.Array = scattered[0].astype(jnp.float32)
    for rank in range(1, ranks):
        total = total + scattered[rank].astype(jnp.float32)
    send[...] = total.astype(jnp.bfloat16)
    gather = _to_all(send, gathered.at[me], gather_send_sem, gather_receive_sem, ranks)
    for copy in gather:
        copy.start()
    gathered[me] = send[...]
    for copy in gather:
        copy.wait_recv()
    result = join([gathered[rank].astype(jnp.float32) for rank in range(ranks)])
    for copy in (*scatter, *gather):
        copy.wait_send()
    return result


def sharded_argmax(
    best: jax.Array,
    index: jax.Array,
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
    columns_per_rank: int,
) -> jax.Array:
    """The global index `[R, 1]` i32 of the largest value over all ranks, the lowest one on ties.

    Value bits and ids travel in one block, as integers: ids as f32 would be flushed denormals.
    `receive` and `receive_sem` alternate as in `all_reduce_one_shot`.

    Args:
      best: `[R, 1]` f32, this rank's largest value per row.
      index: `[R, 1]` i32, its column within this rank's `columns_per_rank`.
      send: `[2 * R, 128]` i32 in VMEM: values, then ids.
      receive: `[ranks, 2 * R, 128]` i32 in VMEM.
    """
    if ranks == 1:
        return index
    me = lax.axis_index(AXIS)
    rows = best.shape[0]
    shape = (rows, LANES)
    bits = lax.bitcast_convert_type(jnp.broadcast_to(best, shape), jnp.int32)
    send[0:rows, :] = bits
    send[rows:, :] = jnp.broadcast_to(index + me * columns_per_rank, shape)
    copies = [
        send_to(send, receive.at[me], send_sem, receive_sem, peer) for peer in peers_of(ranks)
    ]
    for copy in copies:
        copy.start()
    receive[me] = send[...]
    for copy in copies:
        copy.wait_recv()
    top = lax.bitcast_convert_type(receive[0, 0:rows, :], jnp.float32)
    chosen: jax.Array = receive[0, rows:, :]
    for rank in range(1, ranks):
        value = lax.bitcast_convert_type(receive[rank, 0:rows, :], jnp.float32)
        better = value > top
        top = jnp.where(better, value, top)
        chosen = jnp.where(better, receive[rank, rows:, :], chosen)
    for copy in copies:
        copy.wait_send()
    return chosen[:, 0:1]
