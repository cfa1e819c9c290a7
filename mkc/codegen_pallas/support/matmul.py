"""Matmul pieces that are not worth repeating in every generated phase."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor

TAPE_LANES = 256


def lanes(start: Scalar, width: int) -> Any:
    """`width` lanes from `start`, a multiple of 256 that may be a run-time value."""
    if isinstance(start, int):
        return pl.ds(start, width)
    return pl.ds(pl.multiple_of(start, TAPE_LANES), width)


def narrow_matmul(left: Ref, stream: Stream, cursor: StreamCursor, *, K: int) -> jax.Array:
    """`left @ weights^T` for weights kept as rows: `[R, rows]` f32.

    Args:
      left: `[R, K]` bf16 in VMEM.
      stream: items `[K / 256 * rows, 256]` bf16: for every 256 columns of the weights their rows.
    """
    rows = stream.ring.shape[1] * TAPE_LANES // K
    total = None
    for block in range(K // TAPE_LANES):
        weights = stream.ring[cursor.slot, block * rows : (block + 1) * rows, :]
        columns = left[:, block * TAPE_LANES : (block + 1) * TAPE_LANES].astype(jnp.bfloat16)
        part = lax.dot_general(
            columns, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        total = part if total is None else total + part
    assert total is not None
    return total


def copy_out(source: Ref, target: Ref, sem: Ref) -> None:
    """Copies a whole VMEM buffer to HBM and waits."""
    copy = pltpu.make_async_copy(source, target, sem)
    copy.start()
    copy.wait()
