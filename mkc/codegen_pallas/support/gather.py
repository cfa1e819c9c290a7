"""Columns of all ranks, side by side on every rank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mkc.codegen_pallas.support.exchange import AXIS
from mkc.codegen_pallas.support.exchange import peers_of
from mkc.codegen_pallas.support.exchange import send_to
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.vector import join


def all_gather(
    part: jax.Array,
    *,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
) -> jax.Array:
    """Every rank's `part` `[R, n]` f32, bf16 numbers, in rank order: `[R, ranks * n]` f32.

    `receive` and `receive_sem` alternate as in `all_reduce_one_shot`.

    Args:
      send: `[R, N]` bf16 in VMEM, N the columns n rounded up to whole registers.
      receive: `[ranks, R, N]` bf16 in VMEM.
    """
    columns = part.shape[1]
    me = lax.axis_index(AXIS)
    padding = send.shape[1] - columns
    if padding:
        part = join([part, jnp.zeros((part.shape[0], padding), jnp.float32)])
    send[...] = part.astype(jnp.bfloat16)
    copies = [send_to(send, receive.at[me], send_sem, receive_sem, one) for one in peers_of(ranks)]
    for copy in copies:
        copy.start()
    receive[me] = send[...]
    for copy in copies:
        copy.wait_recv()
    parts = [receive[rank].astype(jnp.float32)[:, :columns] for rank in range(ranks)]
    for copy in copies:
        copy.wait_send()
    return join(parts)
