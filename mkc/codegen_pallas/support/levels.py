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
    own: int = 0,
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
      gathered: `[group, w, S - own / group]` in VMEM, like `total`.
      sems: DMA semaphores `[6]`.
      own: of the last so many columns only this rank's share is wanted: the result is
        `[w, N - own + own / group]`. Shares of them are whole registers.
    """
    all_reduce_two_level_start(
        value, send=send, scattered=scattered, sems=sems, group=group, own=own
    )
    return all_reduce_two_level_finish(
        value.shape[1],
        send=send,
        scattered=scattered,
        summed=summed,
        across=across,
        total=total,
        gathered=gathered,
        sems=sems,
        ranks=ranks,
        group=group,
        own=own,
    )


def all_reduce_two_level_start(
    value: jax.Array, *, send: Ref, scattered: Ref, sems: Ref, group: int, own: int = 0
) -> None:
    """The first part of `all_reduce_two_level`: shares are on their way when it returns."""
    width = value.shape[1]
    if own:
        _deal(value, send, group, own)
    else:
        send[:, 0:width] = value.astype(send.dtype)
        if send.shape[1] > width:
            send[:, width:] = jnp.zeros((value.shape[0], send.shape[1] - width), send.dtype)
    _started(_scatter(send, scattered, sems, group))
    place, _ = _place_and_group(group)
    scattered[place] = send[:, _share(send, place, group)]


def _deal(value: jax.Array, send: Ref, group: int, own: int) -> None:
    """Share by share: columns that all ranks get, zeros where they end early, those it keeps."""
    whole, kept = value.shape[1] - own, own // group
    share = send.shape[1] // group
    each = share - kept
    for place in range(group):
        first, end = (min(one * each, whole) for one in (place, place + 1))
        mine = whole + place * kept
        zeros = jnp.zeros((value.shape[0], each - (end - first)), value.dtype)
        parts = [value[:, first:end], zeros, value[:, mine : mine + kept]]
        dealt = join([one for one in parts if one.shape[1]])
        send[:, place * share : (place + 1) * share] = dealt.astype(send.dtype)


def _place_and_group(group: int) -> tuple[jax.Array, jax.Array]:
    """This rank's place in its group, and which group it is."""
    me = lax.axis_index(AXIS)
    return lax.rem(me, jnp.int32(group)), lax.div(me, jnp.int32(group))


def _share(send: Ref, place: jax.Array, group: int) -> Any:
    """The columns that the rank at a place sums."""
    share = send.shape[1] // group
    return pl.ds(pl.multiple_of(place * share, LANES), share)


def _scatter(send: Ref, scattered: Ref, sems: Ref, group: int) -> list[Any]:
    """To everyone in the group its share."""
    place, _ = _place_and_group(group)
    return [
        send_to(
            send.at[:, _share(send, other, group)],
            scattered.at[place],
            sems.at[SCATTER],
            sems.at[SCATTER + 1],
            peer,
        )
        for other, peer in neighbours(group, 1)
    ]


def all_reduce_two_level_finish(
    width: int,
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
    own: int = 0,
) -> jax.Array:
    """What follows in `all_reduce_two_level`; a partial sum has `width` lanes."""
    place, mine = _place_and_group(group)
    groups = ranks // group
    near, far = neighbours(group, 1), neighbours(groups, group)
    scatter = _scatter(send, scattered, sems, group)
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
    each = gathered.shape[2]
    everybodys = total.at[:, 0:each] if own else total
    gather = _started(
        [
            send_to(everybodys, gathered.at[place], sems.at[GATHER], sems.at[GATHER + 1], peer)
            for _, peer in near
        ]
    )
    gathered[place] = total[:, 0:each]
    for copy in gather:
        copy.wait_recv()
    result = join([gathered[one].astype(jnp.float32) for one in range(group)])
    for copy in (*scatter, *crossing, *gather):
        copy.wait_send()
    result = result[:, 0 : width - own]
    return join([result, total[:, each:].astype(jnp.float32)]) if own else result


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
    own: int = 0,
) -> jax.Array:
    """The sum of every rank's `value`, `[1, N]` f32.

    Everyone sends its row to its group, and the sum of the group to those of the other groups that
    have the same place there. Sums run in the order of ranks, then of groups, so that all ranks
    hold the same bits. The row travels as R rows of S lanes, which fill whole tiles.

    Consecutive exchanges need different buffers, two sets in turn, as in `all_reduce_one_shot`.

    Args:
      staged: `[R, S]` f32 in VMEM.
      send: `[R, S]` in VMEM, in which partial sums travel; with `own` `[group, R, S]`.
      receive: `[group, R, S]` in VMEM, like `send`.
      summed: `[R, S]` in VMEM, like `send`.
      across: `[ranks / group, R, S]` in VMEM, like `send`.
      sems: DMA semaphores `[4]`.
      own: of the last so many columns only this rank's share is wanted, and nothing else of them
        travels to it: the result is `[1, N - own + own / group]`. Shares are whole registers.
    """
    all_reduce_two_step_start(
        value, staged=staged, send=send, receive=receive, sems=sems, group=group, own=own
    )
    return all_reduce_two_step_finish(
        value.shape[1],
        send=send,
        receive=receive,
        summed=summed,
        across=across,
        sems=sems,
        ranks=ranks,
        group=group,
        own=own,
    )


def all_reduce_two_step_start(
    value: jax.Array,
    *,
    staged: Ref,
    send: Ref,
    receive: Ref,
    sems: Ref,
    group: int,
    own: int = 0,
) -> None:
    """The first part of `all_reduce_two_step`: the row is on its way when it returns."""
    place, _ = _place_and_group(group)
    if own:
        whole, share = value.shape[1] - own, own // group
        _fold(value[:, 0 : whole + share], staged)
        for other in range(group):
            start = whole + other * share
            if other:
                _fold(value[:, start : start + share], staged, first=whole)
            send[other] = staged[...].astype(send.dtype)
    else:
        _fold(value, staged)
        send[...] = staged[...].astype(send.dtype)
    _started(_near(send, receive, sems, group, own))
    receive[place] = send[place] if own else send[...]


def _near(send: Ref, receive: Ref, sems: Ref, group: int, own: int) -> list[Any]:
    """The row to everyone in the group, or what of it is theirs."""
    place, _ = _place_and_group(group)
    return [
        send_to(
            send.at[other] if own else send,
            receive.at[place],
            sems.at[SCATTER],
            sems.at[SCATTER + 1],
            peer,
        )
        for other, peer in neighbours(group, 1)
    ]


def all_reduce_two_step_finish(
    width: int,
    *,
    send: Ref,
    receive: Ref,
    summed: Ref,
    across: Ref,
    sems: Ref,
    ranks: int,
    group: int,
    own: int = 0,
) -> jax.Array:
    """What follows in `all_reduce_two_step`; a partial sum has `width` lanes."""
    groups = ranks // group
    _, mine = _place_and_group(group)
    near = _near(send, receive, sems, group, own)
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
    result = join([total[row : row + 1] for row in range(total.shape[0])])
    return result[:, 0 : width - own + own // group]


def _fold(value: jax.Array, staged: Ref, first: int = 0) -> None:
    """One row `[1, N]` into the rows of `staged` one after the other.

    From place `first` on; with 0 everything behind the row becomes zero.
    """
    rows, lanes = staged.shape
    last = first + value.shape[1]
    for row in range(rows):
        start, end = (min(max(one - row * lanes, 0), lanes) for one in (first, last))
        if start < end:
            from_place = row * lanes + start - first
            staged[row : row + 1, start:end] = value[:, from_place : from_place + end - start]
        if end < lanes and not first:
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
