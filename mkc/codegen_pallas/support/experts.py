"""Gated MLPs of the chosen experts, whose matrices are loaded when it is known which are needed.

Every distinct expert is loaded once for all rows, into the next slot of a ring, in the order in
which experts are used. A rank has some experts, and a part of their inner width; the sum over the
ranks is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.mxfp4 import BLOCK
from mkc.codegen_pallas.support.mxfp4 import CODE_ROWS
from mkc.codegen_pallas.support.mxfp4 import mxfp4_product
from mkc.codegen_pallas.support.mxfp4 import spread
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.refs import wrapped_next
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import round_bf16
from mkc.codegen_pallas.support.vector import sigmoid
from mkc.ir.mxfp4 import GROUP
from mkc.schedule.expert_store import CHOSEN
from mkc.schedule.expert_store import COUNT


@dataclass(frozen=True, kw_only=True)
class ExpertStore:
    """The experts of a rank in all layers, and the ring that they pass through.

    Matrices are bf16, or int8 as in `mkc.codegen_pallas.support.mxfp4`. Of an inner width w, lanes
    0 .. w - 1 of the first one are the gate's columns, lanes w .. 2 w - 1 the other factor's.

    Attributes:
      gate_up_hbm: `[layers * local, rows, n]`, n = 2 w rounded up to 128.
      down_hbm: `[layers * local, rows, m]`.
      gate_up_ring, down_ring: `[slots, ...]` in VMEM, as in HBM.
      arrived: one DMA semaphore per slot.
      chosen: `[8, n]` i32 in SMEM, from `route`.
      left: `[blocks, groups * r, 256]` bf16 in VMEM: what int8 matrices are multiplied with, None
        for bf16 ones. See `left_shape`.
      local: experts of a layer.
      slots: of the ring; at least two unless one expert is all that can be chosen, because an
        expert's slot is used until the next one has come in.
    """

    gate_up_hbm: Ref
    down_hbm: Ref
    gate_up_ring: Ref
    down_ring: Ref
    arrived: Ref
    chosen: Ref
    left: Ref | None
    local: int
    slots: int


def computed_rows(rows: int) -> int:
    """Rows that are computed for `rows` real ones: one, or whole registers."""
    return 1 if rows == 1 else pl.cdiv(rows, SUBLANES) * SUBLANES


def left_shape(rows: int, K: int) -> tuple[int, int, int]:
    """Shape of `ExpertStore.left` for `rows` rows of `K` columns."""
    return (pl.cdiv(K, BLOCK), BLOCK // GROUP * computed_rows(rows), BLOCK)


def _loads(store: ExpertStore, entry: Scalar, slot: Scalar) -> list[Any]:
    return [
        pltpu.make_async_copy(hbm.at[entry], ring.at[slot], store.arrived.at[slot])
        for hbm, ring in (
            (store.gate_up_hbm, store.gate_up_ring),
            (store.down_hbm, store.down_ring),
        )
    ]


def _start(store: ExpertStore, layer: Scalar, index: Scalar, slot: Scalar) -> None:
    """Starts the loads of the chosen expert number `index`, if there is one."""

    @pl.when(index < store.chosen[COUNT, 0])
    def _load() -> None:
        entry = layer * store.local + store.chosen[CHOSEN, index]
        for copy in _loads(store, entry, slot):
            copy.start(priority=AHEAD_OF_TAPE)


def experts_start(store: ExpertStore, layer: Scalar) -> None:
    """Starts the loads of the first experts, as many as there are slots. Call behind `route`."""

    def one(slot: jax.Array, carry: jax.Array) -> jax.Array:
        _start(store, layer, slot, slot)
        return carry

    lax.fori_loop(0, min(store.slots, store.chosen.shape[1]), one, jnp.int32(0))


def expert_mlp(
    store: ExpertStore,
    layer: Scalar,
    *,
    x: View,
    ids: View,
    weights: View,
    out: View,
    first: Scalar,
    rows: int,
    width: int,
    gate_cap: float | None,
    up_cap: float | None,
) -> None:
    """The weighted sum of the chosen experts' outputs, as far as this rank has them.

    sum_e weight_e down_e round(cap(gate_e x) sigmoid(gate_e x) cap(up_e x)) in ascending order of
    experts, where cap(z) is c tanh(z / c), or z; see `mkc.ir.ops_experts.ExpertMlp`. Outputs are
    parts of sums over ranks and therefore not rounded. Call once behind `experts_start`.

    Args:
      layer: as given to `experts_start`.
      x: `[R, m]` bf16 numbers.
      ids: `[R, k]` in an i32 buffer, as is `weights` in an f32 one; from `route`.
      out: `[R, m]` f32; rows behind the computed ones become zero.
      first: the first expert of this rank.
      rows: rows that count, as given to `route`.
      width: the inner width w of this rank, a multiple of 32.
    """
    computed = computed_rows(rows)
    packed = store.left is not None
    missing = -width % CODE_ROWS if packed else 0
    spread_x: Ref = store.left
    value = x.load()[:computed]
    left: list[Any] = []
    if packed:
        for index, block in enumerate(spread(value)):
            shape = (slice(0, block.shape[0]), slice(0, block.shape[1]))
            spread_x[index, *shape] = block
            left.append(spread_x.at[index, *shape])
    out.store(jnp.zeros((out.ref.shape[0], out.width), jnp.float32))

    def product(value: jax.Array, spread_value: list[Any], matrix: Ref) -> jax.Array:
        if packed:
            return mxfp4_product(spread_value, matrix)
        return jnp.dot(value.astype(jnp.bfloat16), matrix[...], preferred_element_type=jnp.float32)

    def gated(slot: Scalar) -> jax.Array:
        """Of the expert in a slot: `[computed, width]`, then zeros to a whole tile of codes."""
        both = product(value, left, store.gate_up_ring.at[slot])
        inner = round_bf16(_gated(both[:, :width], both[:, width : 2 * width], gate_cap, up_cap))
        return join([inner, jnp.zeros((computed, missing), jnp.float32)]) if missing else inner

    def add(index: Scalar, slot: Scalar, inner: jax.Array, counts: Any) -> None:
        """Adds the output of the chosen expert number `index`, nothing unless it `counts`."""
        own = product(inner, spread(inner) if packed else [], store.down_ring.at[slot])
        number = first + store.chosen[CHOSEN, index]
        mine = (ids.load()[:computed] == number) & counts
        weight = jnp.sum(jnp.where(mine, weights.load()[:computed], 0.0), axis=1, keepdims=True)
        # Not a product with zero: an expert that a row did not choose may overflow.
        out.ref[0:computed, out.columns] += jnp.where(weight != 0, own * weight, 0.0)

    def one_expert(
        index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First product of an expert, second one of the expert before it: neither waits for the
        other, and the activation between an expert's own is not waited for."""
        slot, before, inner = carry
        for copy in _loads(store, 0, slot):
            copy.wait()
        following = gated(slot)
        add(jnp.maximum(index - 1, 0), before, inner, index > 0)

        @pl.when(index > 0)
        def _refill() -> None:
            _start(store, layer, index - 1 + store.slots, before)

        return wrapped_next(slot, store.slots), slot, following

    count = store.chosen[COUNT, 0]
    nothing = jnp.zeros((computed, width + missing), jnp.float32)
    begin = (jnp.int32(0), jnp.int32(0), nothing)
    _, last, inner = lax.fori_loop(0, count, one_expert, begin)

    @pl.when(count > 0)
    def _last() -> None:
        add(count - 1, last, inner, True)


def _gated(
    gate: jax.Array, up: jax.Array, gate_cap: float | None, up_cap: float | None
) -> jax.Array:
    """cap(gate) sigmoid(gate) cap(up)."""

    def capped(value: jax.Array, cap: float | None) -> jax.Array:
        return value if cap is None else cap * jnp.tanh(value / cap)

    return capped(gate, gate_cap) * sigmoid(gate) * capped(up, up_cap)
