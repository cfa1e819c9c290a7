"""Columns of all ranks, side by side on every rank."""

from __future__ import annotations

from collections.abc import Sequence

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
    starts = [sum(one.shape[1] for one in parts[:number]) for number, _ in enumerate(parts)]
    columns = starts[-1] + parts[-1].shape[1]
    place = lax.rem(lax.axis_index(AXIS), jnp.int32(ranks))
    padding = send.shape[1] - columns
    zeros = [jnp.zeros((parts[0].shape[0], padding), jnp.float32)] if padding else []
    send[...] = join([*parts, *zeros]).astype(send.dtype)
    peers = [peer for _, peer in neighbours(ranks, 1)]
    copies = [send_to(send, receive.at[place], send_sem, receive_sem, peer) for peer in peers]
    for copy in copies:
        copy.start()
    receive[place] = send[...]
    for copy in copies:
        copy.wait_recv()
    arrived = [receive[rank].astype(jnp.float32) for rank in range(ranks)]
    for copy in copies:
        copy.wait_send()
    return [
        join([one[:, start : start + part.shape[1]] for one in arrived])
        for start, part in zip(starts, parts, strict=True)
    ]
