"""Tape, streams and embedding: order, sizes, wrap-around, write-back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

ALL_MODES = pytest.mark.parametrize("mode", list(Mode))


def dma(*shape: int) -> Any:
    return pltpu.SemaphoreType.DMA(shape)


@ALL_MODES
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_tape_hands_out_loads_in_order(slots: int, mode: Mode) -> None:
    loads = (32, 16, 32, 48, 16)
    tape = np.arange(sum(loads) * 256).reshape(-1, 256) % 251
    tape = tape.astype(ml_dtypes.bfloat16)

    def body(hbm: Any, out: Any, ring: Any, sems: Any) -> None:
        weights = s.Tape(hbm=hbm, ring=ring, sems=sems, slots=slots)
        cursor = s.tape_prologue(weights, loads)
        first = 0
        for index, rows in enumerate(loads):
            s.tape_wait(weights, cursor, rows)
            out[first : first + rows, :] = ring[cursor.slot, 0:rows, :]
            first += rows
            ahead = index + slots
            cursor = s.tape_refill(weights, cursor, loads[ahead] if ahead < len(loads) else None)

    (out,) = run(
        body,
        operands=[(tape, HBM)],
        results=[(tape.shape, jnp.bfloat16, VMEM)],
        scratch=[VMEM((slots, max(loads), 256), jnp.bfloat16), dma(slots)],
        mode=mode,
    )
    np.testing.assert_array_equal(out, tape)


@ALL_MODES
def test_tape_refill_cases_takes_the_first_case_that_holds(mode: Mode) -> None:
    """Six loads of 16 rows, then 48, then 32, then nothing, chosen by the loop counter."""
    slots, steps = 2, 6
    loads = (16,) * steps + (48, 32)
    tape = np.random.default_rng(0).normal(size=(sum(loads), 256)).astype(ml_dtypes.bfloat16)

    def body(hbm: Any, out: Any, ring: Any, sems: Any) -> None:
        weights = s.Tape(hbm=hbm, ring=ring, sems=sems, slots=slots)

        def step(index: jax.Array, cursor: s.TapeCursor) -> s.TapeCursor:
            s.tape_wait(weights, cursor, 16)
            out[pl.ds(index * 16, 16), :] = ring[cursor.slot, 0:16, :]
            ahead = index + slots
            cases = [(ahead < steps, 16), (ahead == steps, 48), (ahead <= steps + 1, 32)]
            return s.tape_refill_cases(weights, cursor, cases, None)

        cursor = lax.fori_loop(0, steps, step, s.tape_prologue(weights, loads))
        s.tape_wait(weights, cursor, 48)
        out[96:144, :] = ring[cursor.slot]
        cursor = s.tape_refill_cases(weights, cursor, [(cursor.slot == 9, None)], None)
        s.tape_wait(weights, cursor, 32)
        out[144:176, :] = ring[cursor.slot, 0:32, :]

    (out,) = run(
        body,
        operands=[(tape, HBM)],
        results=[(tape.shape, jnp.bfloat16, VMEM)],
        scratch=[VMEM((slots, 48, 256), jnp.bfloat16), dma(slots)],
        mode=mode,
    )
    np.testing.assert_array_equal(out, tape)


def test_reading_a_load_that_was_not_waited_for_is_noticed() -> None:
    """The tests here rest on it: late copies show the missing wait."""
    tape = np.ones((32, 256), ml_dtypes.bfloat16)

    def body(hbm: Any, out: Any, ring: Any, sems: Any) -> None:
        weights = s.Tape(hbm=hbm, ring=ring, sems=sems, slots=2)
        cursor = s.tape_prologue(weights, (16, 16))
        out[...] = ring[1]  # only slot 0 is waited for before
        s.tape_wait(weights, cursor, 16)
        s.tape_wait(weights, cursor._replace(slot=1), 16)

    with pytest.raises(Exception, match="[Rr]ace"):
        run(
            body,
            operands=[(tape, HBM)],
            results=[((16, 256), jnp.bfloat16, VMEM)],
            scratch=[VMEM((2, 16, 256), jnp.bfloat16), dma(2)],
        )


def test_tape_refuses_a_load_of_partial_tiles() -> None:
    with pytest.raises(AssertionError, match="24 rows is not a multiple of 16"):
        s.tape_prologue(s.Tape(hbm=None, ring=None, sems=None, slots=1), (24,))


@ALL_MODES
@pytest.mark.parametrize(("items", "slots"), [(1, 1), (3, 1), (3, 3), (7, 2), (7, 3)])
def test_stream_reads_every_item_once_in_order(items: int, slots: int, mode: Mode) -> None:
    values = np.random.default_rng(1).normal(size=(items, 8, 128)).astype(np.float32)

    def body(hbm: Any, out: Any, ring: Any, arrived: Any) -> None:
        stream = s.Stream(
            hbm=hbm, ring=ring, arrived=arrived, written=None, items=items, slots=slots
        )

        def step(index: jax.Array, cursor: s.StreamCursor) -> s.StreamCursor:
            s.stream_wait(stream, cursor)
            out[index] = ring[cursor.slot]
            return s.stream_advance(stream, cursor)

        lax.fori_loop(0, items, step, s.stream_prologue(stream))
        s.stream_drain(stream)

    (out,) = run(
        body,
        operands=[(values, HBM)],
        results=[(values.shape, jnp.float32, VMEM)],
        scratch=[VMEM((slots, 8, 128), jnp.float32), dma(slots)],
        mode=mode,
    )
    np.testing.assert_array_equal(out, values)


@ALL_MODES
@pytest.mark.parametrize(("items", "slots"), [(1, 1), (2, 2), (3, 3), (7, 2), (7, 3)])
def test_stream_updates_items_in_place(items: int, slots: int, mode: Mode) -> None:
    values = np.random.default_rng(2).normal(size=(items, 8, 128)).astype(np.float32)

    def body(_: Any, hbm: Any, ring: Any, arrived: Any, written: Any) -> None:
        stream = s.Stream(
            hbm=hbm, ring=ring, arrived=arrived, written=written, items=items, slots=slots
        )

        def step(index: jax.Array, cursor: s.StreamCursor) -> s.StreamCursor:
            s.stream_wait(stream, cursor)
            ring[cursor.slot] = ring[cursor.slot] * 2.0 + index.astype(jnp.float32)
            return s.stream_advance(stream, cursor)

        lax.fori_loop(0, items, step, s.stream_prologue(stream))
        s.stream_drain(stream)

    (out,) = run(
        body,
        operands=[(values, HBM)],
        results=[(values.shape, jnp.float32, HBM)],
        scratch=[VMEM((slots, 8, 128), jnp.float32), dma(slots), dma(slots)],
        aliases={0: 0},
        mode=mode,
    )
    order = np.arange(items, dtype=np.float32)[:, None, None]
    np.testing.assert_array_equal(out, values * 2 + order)


def test_stream_refuses_slots_that_cannot_work() -> None:
    parts = {"hbm": None, "ring": None, "arrived": None}
    with pytest.raises(AssertionError, match="3 slots for 2 items"):
        s.Stream(**parts, written=None, items=2, slots=3)
    with pytest.raises(AssertionError, match="one slot cannot overlap"):
        s.Stream(**parts, written="semaphores", items=2, slots=1)


@ALL_MODES
@pytest.mark.parametrize(("batch", "hidden"), [(1, 256), (3, 128), (8, 256)])
def test_embed_takes_the_row_of_every_token(batch: int, hidden: int, mode: Mode) -> None:
    """A row that rests looks up position -1, and gets row 0: no copy leaves the table."""
    vocabulary = 48
    table = np.random.default_rng(3).normal(size=(vocabulary, hidden)).astype(ml_dtypes.bfloat16)
    tokens = np.array([47, -1, 16, 15, 31, 32, 7, 47], np.int32)[:batch]
    rows = np.maximum(tokens, 0)
    others = np.setdiff1d(np.arange(vocabulary), rows)
    table[others] = np.nan  # a row that is only a neighbour must not matter

    def body(tokens: Any, table: Any, out: Any, blocks: Any, sem: Any) -> None:
        s.embed(table=table, tokens=tokens, blocks=blocks, sem=sem, out=out, batch=batch)

    (out,) = run(
        body,
        operands=[(tokens, SMEM), (table, HBM)],
        results=[((8, hidden), jnp.float32, VMEM)],
        scratch=[VMEM((batch, 16, hidden), jnp.bfloat16), pltpu.SemaphoreType.DMA],
        mode=mode,
    )
    expected = np.zeros((8, hidden), np.float32)
    expected[:batch] = table[rows]
    np.testing.assert_array_equal(out, expected)
