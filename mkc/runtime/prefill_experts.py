"""Mixtures of experts over many rows, from the entries that the kernel reads.

Rows are sorted by expert. A loop takes up to `PIECE_ROWS` rows of one expert at a time, so that one
expert's matrices are decoded at a time, and those that no row chose are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.mxfp4 import CODES_PER_BYTE
from mkc.ir.mxfp4 import GROUP
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.reference_experts import gated
from mkc.ir.types import DType
from mkc.runtime.prefill_ops import AXIS
from mkc.runtime.prefill_ops import contract
from mkc.runtime.tape_index import ExpertUse
from mkc.schedule.expert_store import CODE_ROWS
from mkc.schedule.expert_store import ExpertSlice
from mkc.schedule.expert_store import whole

# Products of so many rows take about as long as reading a matrix. Fewer read it again sooner, more
# compute rows that are not there.
PIECE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Rows of the experts of a rank, up to `rows` of one expert together.

    Attributes:
      rows: of a piece.
      order: numbers of row * k + place, ascending by expert; of other ranks' experts last.
      starts, counts: of every expert among them, i32 [local].
      ends: number of pieces up to every expert and with it, i32 [local].
    """

    rows: int
    order: Array
    starts: Array
    counts: Array
    ends: Array

    def of(self, piece: Array) -> tuple[Array, Array, Array]:
        """Expert of a piece, its entries in the order, and which of them there are, [rows]."""
        expert = jnp.searchsorted(self.ends, piece, side="right")
        start, count = self.starts[expert], self.counts[expert]
        before = self.ends[expert] - -(-count // self.rows)
        place = (piece - before) * self.rows + jnp.arange(self.rows)
        return expert, self.order[jnp.minimum(start + place, self.order.size - 1)], place < count


def expert_sum(
    op: ExpertMlp,
    use: ExpertUse,
    x: Array,
    ids: Array,
    weights: Array,
    counted: Array,
    *,
    gate_up: Array,
    down: Array,
    layer: Array,
) -> Array:
    """What the experts of this rank contribute, see `mkc.passes.rank_ops.ShardedExpertMlp`.

    Args:
      x: [rows, n].
      ids, weights: [rows, k] of each row's experts.
      counted: bool [rows]; the others get anything.
      gate_up, down: operands of this rank.
      layer: executions of the mixture before this one.

    Returns:
      f32 like x; in ascending order of experts, their outputs not rounded.
    """
    plan, held = use.plan, use.held
    rows, k = ids.shape
    first = lax.axis_index(AXIS) // plan.slices * plan.local
    pieces = _pieces(jnp.where(counted[:, None], ids - first, -1), plan.local)

    def one_piece(number: Array, total: Array) -> Array:
        expert, entries, there = pieces.of(number)
        entry = layer * plan.local + expert
        row = jnp.where(there, entries // k, rows)  # what is not there is behind the last row
        value = x.at[row].get(mode="fill", fill_value=0)
        both = _product(value, _entry(gate_up, entry), held)
        gate, up = both[:, : held.width], both[:, held.width : 2 * held.width]
        middle = gated(gate, up, op.gate_cap, op.up_cap).astype(x.dtype)
        own = _product(middle, _entry(down, entry), held)
        weight = weights.reshape(-1)[entries][:, None]
        # Not a product with zero: what is not there may overflow.
        part = jnp.where(there[:, None], own * weight, 0.0)
        return total.at[row].add(part, mode="drop")

    total: Array = lax.fori_loop(0, pieces.ends[-1], one_piece, jnp.zeros(x.shape, jnp.float32))
    return total


def _pieces(local_ids: Array, local: int) -> _Pieces:
    """Of ids [rows, k] among the experts of this rank; those outside of 0 .. local are not."""
    is_mine = (local_ids >= 0) & (local_ids < local)
    flat = jnp.where(is_mine, local_ids, local).reshape(-1)
    rows = min(PIECE_ROWS, local_ids.shape[0])
    counts = jnp.bincount(flat, length=local)
    return _Pieces(
        rows=rows,
        order=jnp.argsort(flat, stable=True),
        starts=jnp.cumsum(counts) - counts,
        counts=counts,
        ends=jnp.cumsum(-(-counts // rows)),
    )


def _entry(array: Array, number: Array) -> Array:
    """One entry [rows, columns]. Without its first axis the array has one layout to be in; with it
    the compiler chooses another one for the entry, and begins with a copy of all entries.
    """
    _, rows, columns = array.shape
    return lax.dynamic_slice(array.reshape(-1, columns), (number * rows, 0), (rows, columns))


def _product(x: Array, entry: Array, held: ExpertSlice) -> Array:
    """x [rows, inputs] times a matrix as it lies in an entry: f32 [rows, columns]."""
    if held.dtype is not DType.E2M1X2:
        return contract("rk,kn->rn", x, entry)
    inputs = whole(x.shape[1], CODE_ROWS)
    padded = jnp.pad(x, ((0, 0), (0, inputs - x.shape[1])))
    halves = [padded[:, first::CODES_PER_BYTE] for first in range(CODES_PER_BYTE)]
    matrix = decoded(entry, inputs).astype(x.dtype)
    return contract("rk,kn->rn", jnp.concatenate(halves, axis=1), matrix)


def decoded(entry: Array, inputs: int) -> Array:
    """Values of rows of bytes, see `mkc.runtime.pack_experts`; exact.

    Side by side as they lie in a byte, the inputs would stand between registers; so the even ones
    come first, then the odd ones.

    Returns:
      f32 [inputs, columns].
    """
    stored = entry.astype(jnp.int32) & 0xFF
    pairs, behind = stored[: inputs // CODES_PER_BYTE], inputs // CODES_PER_BYTE
    # The bits of a power of two in f32 are its biased exponent.
    exponents = stored[behind : behind + inputs // GROUP] << 23
    factors = lax.bitcast_convert_type(exponents, jnp.float32)[:, None]

    def values(codes: Array) -> Array:
        step = (codes & 7).astype(jnp.float32)  # number of the magnitude, see `mxfp4.CODES`
        size = jnp.where(step < 4, step / 2, jnp.where(step < 6, step - 2, 2 * step - 8))
        signed = jnp.where(codes > 7, -size, size).reshape(inputs // GROUP, -1, codes.shape[1])
        return (signed * factors).reshape(codes.shape)

    return jnp.concatenate([values(pairs & 15), values(pairs >> 4)])
