"""Sums over ranks that are grouped, such as the devices of a host: within groups, between them.

Fewer messages than from everybody to everybody, for one more phase: of 32 ranks in groups of 8 a
rank sends 7, 3 and 7 messages instead of 31 and 31. A single row may travel whole: 7 and 3.

Partial sums travel in the type of the buffers they are sent from, f32 or bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.exchange import AXIS
from mkc.codegen_pallas.support.exchange import send_to
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.vector import join

SCATTER, ACROSS, GATHER = 0, 2, 4  # semaphores of each phase: what was sent, what has arrived


def neighbours(count: int, stride: int) -> list[tuple[jax.Array, jax.Array]]:
    """The others among `count` ranks that are `stride` apart: (place among them, rank).

    In the order of sending, as of `exchange.peers_of`.
    """
    me = lax.axis_index(AXIS)
    place = lax.rem(lax.div(me, jnp.int32(stride)), jnp.int32(count))
    found = []
    for distance in range(count - 1, 0, -1):
        if count & (count - 1) == 0:
            other = jnp.bitwise_xor(place, distance)
        else:
            moved = place + distance
            other = jnp.where(moved >= count, moved - count, moved)
        found.append((other, me + (other - place) * stride))
    return found


def all_reduce_two_level(
    value: jax.Array,
    *,
    send: Ref,
    scattered: Ref,
    summed: Ref,
    across: Ref,
    total: Ref,
    gathered: Ref,
    sems: Ref,
    ranks: int,
    group: int,
) -> jax.Array:
    """The sum of every rank's `value`, `[w, N]` f32 with w 1 or 8, rounded to the type of `total`.

    In a group of adjoining ranks everyone sums one share of the columns. Those of all groups with
    the same share sum it between them, and everyone sends the result to its group. Sums run in the
    order of ranks, then of groups, so that all ranks hold the same bits.

    Consecutive exchanges need different buffers, two sets in turn, as in `all_reduce_one_shot`.

    Args:
      send: `[w, group * S]` in VMEM; S columns are a share, in whole registers.
      scattered: `[group, w, S]` in VMEM, like `send`.
      summed: `[w, S]` in VMEM, like `send`.
      across: `[ranks / group, w, S]` in VMEM, like `send`.
      total: `[w, S]` in VMEM, bf16 when w is 8 and the sum is rounded to it, else f32.
      gathered: `[group, w, S]` in VMEM, like `total`.
      sems: DMA semaphores `[6]`.
    """
    width, groups = value.shape[1], ranks // group
    me = lax.axis_index(AXIS)
    place, mine = lax.rem(me, jnp.int32(group)), lax.div(me, jnp.int32(group))
    share = send.shape[1] // group
    send[:, 0:width] = value.astype(send.dtype)
    if send.shape[1] > width:
        send[:, width:] = jnp.zeros((value.shape[0], send.shape[1] - width), send.dtype)

    def block(of: jax.Array) -> Any:
        return pl.ds(pl.multiple_of(of * share, LANES), share)

    near, far = neighbours(group, 1), neighbours(groups, group)
    scatter = _started(
        [
            send_to(
                send.at[:, block(other)],
                scattered.at[place],
                sems.at[SCATTER],
                sems.at[SCATTER + 1],
                peer,
            )
            for other, peer in near
        ]
    )
    scattered[place] = send[:, block(place)]
    for copy in scatter:
        copy.wait_recv()
    summed[...] = _sum(scattered, group).astype(summed.dtype)
    crossing = _started(
        [
            send_to(summed, across.at[mine], sems.at[ACROSS], sems.at[ACROSS + 1], peer)
            for _, peer in far
        ]
    )
    across[mine] = summed[...]
    for copy in crossing:
        copy.wait_recv()
    total[...] = _sum(across, groups).astype(total.dtype)
    gather = _started(
        [
            send_to(total, gathered.at[place], sems.at[GATHER], sems.at[GATHER + 1], peer)
            for _, peer in near
        ]
    )
    gathered[place] = total[...]
    for copy in gather:
        copy.wait_recv()
    result = join([gathered[one].astype(jnp.float32) for one in range(group)])
    for copy in (*scatter, *crossing, *gather):
        copy.wait_send()
    return result[:, 0:width]


def all_reduce_two_step(
    value: jax.Array,
    *,
    staged: Ref,
    send: Ref,
    receive: Ref,
    summed: Ref,
    across: Ref,
    sems: Ref,
    ranks: int,
    group: int,
) -> jax.Array:
    """The sum of every rank's `value`, `[1, N]` f32.

    Everyone sends its row to its group, and the sum of the group to those of the other groups that
    have the same place there. Sums run in the order of ranks, then of groups, so that all ranks
    hold the same bits. The row travels as R rows of S lanes, which fill whole tiles.

    Consecutive exchanges need different buffers, two sets in turn, as in `all_reduce_one_shot`.

    Args:
      staged: `[R, S]` f32 in VMEM.
      send: `[R, S]` in VMEM, in which partial sums travel.
      receive: `[group, R, S]` in VMEM, like `send`.
      summed: `[R, S]` in VMEM, like `send`.
      across: `[ranks / group, R, S]` in VMEM, like `send`.
      sems: DMA semaphores `[4]`.
    """
    groups = ranks // group
    me = lax.axis_index(AXIS)
    place, mine = lax.rem(me, jnp.int32(group)), lax.div(me, jnp.int32(group))
    _fold(value, staged)
    send[...] = staged[...].astype(send.dtype)
    near = _started(
        [
            send_to(send, receive.at[place], sems.at[SCATTER], sems.at[SCATTER + 1], peer)
            for _, peer in neighbours(group, 1)
        ]
    )
    receive[place] = send[...]
    for copy in near:
        copy.wait_recv()
    summed[...] = _sum(receive, group).astype(summed.dtype)
    far = _started(
        [
            send_to(summed, across.at[mine], sems.at[ACROSS], sems.at[ACROSS + 1], peer)
            for _, peer in neighbours(groups, group)
        ]
    )
    across[mine] = summed[...]
    for copy in far:
        copy.wait_recv()
    total = _sum(across, groups)
    for copy in (*near, *far):
        copy.wait_send()
    return join([total[row : row + 1] for row in range(total.shape[0])])[:, 0 : value.shape[1]]


def _fold(value: jax.Array, staged: Ref) -> None:
    """One row `[1, N]` into the rows of `staged` one after the other, zeros behind it."""
    rows, lanes = staged.shape
    width = value.shape[1]
    for row in range(rows):
        end = min(max(width - row * lanes, 0), lanes)
        if end:
            staged[row : row + 1, 0:end] = value[:, row * lanes : row * lanes + end]
        if end < lanes:
            staged[row : row + 1, end:] = jnp.zeros((1, lanes - end), jnp.float32)


def _started(copies: Sequence[Any]) -> Sequence[Any]:
    for copy in copies:
        copy.start()
    return copies


def _sum(parts: Ref, count: int) -> jax.Array:
    """In order, in f32."""
    total: jax.Array = parts[0].astype(jnp.float32)
    for one in range(1, count):
        total = total + parts[one].astype(jnp.float32)
    return total
