"""Columns of all ranks, side by side on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mkc.codegen_pallas.support.exchange import AXIS
from mkc.codegen_pallas.support.exchange import send_to
from mkc.codegen_pallas.support.levels import neighbours
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.vector import join


def all_gather(
    parts: Sequence[jax.Array],
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
) -> list[jax.Array]:
    """Of each part `[w, n]` f32 those of so many adjoining ranks, in order: `[w, ranks * n]` f32.

    All parts are in one message, so what its buffers hold of them must be exact: bf16 numbers where
    they are bf16. `receive` and `receive_sem` alternate as in `all_reduce_one_shot`.

    Args:
      send: `[w, N]` bf16 or f32 in VMEM, N all columns rounded up to whole registers.
      receive: `[ranks, w, N]` in VMEM, of the same dtype.
    """
    buffers = {"send": send, "receive": receive, "send_sem": send_sem, "receive_sem": receive_sem}
    all_gather_start(parts, **buffers, ranks=ranks)
    return all_gather_finish([one.shape[1] for one in parts], **buffers, ranks=ranks)


def all_gather_start(
    parts: Sequence[jax.Array],
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
) -> None:
    """The first half of `all_gather`: messages are on their way when it returns."""
    columns = sum(one.shape[1] for one in parts)
    padding = send.shape[1] - columns
    zeros = [jnp.zeros((parts[0].shape[0], padding), jnp.float32)] if padding else []
    send[...] = join([*parts, *zeros]).astype(send.dtype)
    for copy in _copies(send, receive, send_sem, receive_sem, ranks):
        copy.start()
    receive[_place(ranks)] = send[...]


def all_gather_finish(
    widths: Sequence[int],
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
) -> list[jax.Array]:
    """The second half of `all_gather`; `widths` are the columns of the parts."""
    copies = _copies(send, receive, send_sem, receive_sem, ranks)
    for copy in copies:
        copy.wait_recv()
    arrived = [receive[rank].astype(jnp.float32) for rank in range(ranks)]
    for copy in copies:
        copy.wait_send()
    starts = [sum(widths[:number]) for number, _ in enumerate(widths)]
    return [
        join([one[:, start : start + width] for one in arrived])
        for start, width in zip(starts, widths, strict=True)
    ]


def _place(ranks: int) -> jax.Array:
    return lax.rem(lax.axis_index(AXIS), jnp.int32(ranks))


def _copies(send: Ref, receive: Ref, send_sem: Ref, receive_sem: Ref, ranks: int) -> list[Any]:
    """To all others of the group."""
    place = _place(ranks)
    peers = [peer for _, peer in neighbours(ranks, 1)]
    return [send_to(send, receive.at[place], send_sem, receive_sem, peer) for peer in peers]
