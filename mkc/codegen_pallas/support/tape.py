"""The tape: weights in consumption order, streamed from HBM through a ring of slots in VMEM.

A load is one copy of consecutive tape rows into one slot. Loads follow each other without gaps, so
the place of the next load is a running row count. Every load is started once, by the prologue or by
the refill of the slot that was consumed just before, and waited for once by `tape_wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import wrapped_next


@dataclass(frozen=True, kw_only=True)
class Tape:
    """The references of a tape.

    Attributes:
      hbm: `[rows, 256]` bf16.
      ring: `[slots, slot_rows, 256]` bf16 in VMEM.
      sems: one DMA semaphore per slot.
      rows: rows of the tape when it is played again from its first row after the last, else None.
    """

    hbm: Ref
    ring: Ref
    sems: Ref
    slots: int
    rows: int | None = None


class TapeCursor(NamedTuple):
    """Where a tape stands: the slot to consume next and the tape row of the next load to start."""

    slot: Scalar
    row: Scalar


def _load(tape: Tape, slot: Scalar, row: Scalar, rows: int) -> Any:
    """The copy of tape rows `row` .. `row + rows` into `slot`. Every load size is a multiple of
    16 rows, hence so is every load's first row: the sum of the sizes before it."""
    assert rows % BF16_ROWS == 0, f"a load of {rows} rows is not a multiple of {BF16_ROWS}"
    if not isinstance(row, int):
        row = pl.multiple_of(row, BF16_ROWS)
    return pltpu.make_async_copy(
        tape.hbm.at[pl.ds(row, rows), :],
        tape.ring.at[slot, pl.ds(0, rows), :],
        tape.sems.at[slot],
    )


def tape_prologue(tape: Tape, loads: Sequence[int]) -> TapeCursor:
    """Starts the first `slots` loads, or all when there are fewer.

    Args:
      loads: row counts of the first loads, in order; those beyond `slots` are ignored.
    """
    row = 0
    for slot, rows in enumerate(loads[: tape.slots]):
        _load(tape, slot, row, rows).start()
        row += rows
    if row == tape.rows:
        row = 0  # the ring holds the whole tape
    return TapeCursor(slot=jnp.int32(0), row=jnp.int32(row))


def tape_wait(tape: Tape, cursor: TapeCursor, rows: int) -> None:
    """Waits until the load of `rows` rows in slot `cursor.slot` has landed."""
    _load(tape, cursor.slot, 0, rows).wait()


def tape_refill(tape: Tape, cursor: TapeCursor, rows: int | None) -> TapeCursor:
    """Starts the next load into the slot that was just consumed and moves to the next slot.

    Args:
      rows: size of the next load; None when no load is left.
    """
    if rows is not None:
        _load(tape, cursor.slot, cursor.row, rows).start()
    return _moved(tape, cursor, cursor.row + jnp.int32(rows or 0))


def _moved(tape: Tape, cursor: TapeCursor, row: Scalar) -> TapeCursor:
    """The next slot, and row `row` or the first one behind the end of the tape."""
    if tape.rows is not None:
        row = jnp.where(row == tape.rows, 0, row)
    return TapeCursor(slot=wrapped_next(cursor.slot, tape.slots), row=row)


def tape_refill_cases(
    tape: Tape,
    cursor: TapeCursor,
    cases: Sequence[tuple[jax.Array, int | None]],
    otherwise: int | None,
) -> TapeCursor:
    """`tape_refill` whose size is that of the first case that holds, or `otherwise`.

    One copy instruction is emitted per distinct size, not per case.
    """
    sizes = {rows for _, rows in cases} | {otherwise}
    if len(sizes) == 1:
        return tape_refill(tape, cursor, otherwise)
    chosen = jnp.int32(otherwise or 0)
    for predicate, rows in reversed(cases):
        chosen = jnp.where(predicate, jnp.int32(rows or 0), chosen)
    for rows in sorted(rows for rows in sizes if rows is not None):

        @pl.when(chosen == rows)
        def _start(rows: int = rows) -> None:
            _load(tape, cursor.slot, cursor.row, rows).start()

    return _moved(tape, cursor, cursor.row + chosen)


@dataclass(frozen=True)
class Choice:
    """A load size that depends on how a loop goes on: the first case that holds, or `otherwise`."""

    cases: tuple[tuple[jax.Array, int | None], ...]
    otherwise: int | None


def refill(tape: Tape, cursor: TapeCursor, size: int | Choice | None) -> TapeCursor:
    """Refills the slot just consumed: with a load of `size` rows, by choice, or not at all."""
    if isinstance(size, Choice):
        return tape_refill_cases(tape, cursor, size.cases, size.otherwise)
    return tape_refill(tape, cursor, size)


def tape_drain(tape: Tape, cursor: TapeCursor, loads: Sequence[int], when: jax.Array) -> None:
    """Waits for loads that were started for a round that does not come, so that no copy outlives
    the kernel.

    Args:
      loads: their row counts, from the slot at the cursor.
    """

    @pl.when(when)
    def _wait() -> None:
        slot = cursor.slot
        for rows in loads:
            _load(tape, slot, 0, rows).wait()
            slot = wrapped_next(slot, tape.slots)
