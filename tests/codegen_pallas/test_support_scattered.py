"""Sums of which each rank of a group wants its own columns alone, against numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.exchange_plan import scattered_columns
from mkc.schedule.messages import messages
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run_ranks
from tests.codegen_pallas.test_support_levels import NUMPY
from tests.codegen_pallas.test_support_levels import in_levels

RANKS, GROUP, STEPS = 4, 2, 2
WHOLE, OWN = 384, 512  # 384 is no whole number of registers for each of two ranks


def wanted(total: np.ndarray, rank: int) -> np.ndarray:
    """What a rank gets of a sum `[rows, WHOLE + OWN]`."""
    share = OWN // GROUP
    first = WHOLE + rank % GROUP * share
    return np.concatenate([total[:, :WHOLE], total[:, first : first + share]], axis=1)


@pytest.mark.parametrize("wire", [DType.F32, DType.BF16])
@pytest.mark.parametrize(("kind", "rows"), [("two_level", 8), ("two_level", 1), ("two_step", 1)])
def test_a_rank_gets_all_of_one_part_and_its_share_of_the_other(
    kind: str, rows: int, wire: DType
) -> None:
    """Two sets of buffers in turn, the sum in two halves with work between them; nothing of an
    earlier exchange is left."""
    columns = WHOLE + OWN
    if kind == "two_level":
        columns = scattered_columns(WHOLE, GROUP) + OWN
    plan = ExchangePlan(
        name="",
        kind=kind,
        rows=rows,
        columns=columns,
        safe_because="",
        group=GROUP,
        wire=wire,
        scattered=OWN,
    )
    buffers = exchange_buffers(plan, RANKS)
    names = [suffix for suffix, *_ in buffers]
    x = np.random.default_rng(2).normal(size=(RANKS, rows, WHOLE + OWN)).astype(np.float32)
    starts = {"two_level": ("send", "scattered"), "two_step": ("staged", "send", "receive")}[kind]

    def body(x: Any, out: Any, *scratch: Any) -> None:
        s.entry_barrier(RANKS)
        half = len(scratch) // 2

        def turns(index: jax.Array, carry: jax.Array) -> jax.Array:
            for parity in (0, 1):
                *arrays, sems = scratch[parity * half : (parity + 1) * half]
                memory = dict(zip(names, arrays, strict=True))
                number = 2 * index + parity
                value = x[...] * (1.0 + number.astype(jnp.float32))
                first = {name: memory[name] for name in starts}
                start = getattr(s, f"all_reduce_{kind}_start")
                start(value, **first, sems=sems, group=GROUP, own=OWN)
                memory.pop("staged", None)
                finish = getattr(s, f"all_reduce_{kind}_finish")
                out[number] = finish(
                    WHOLE + OWN, **memory, sems=sems, ranks=RANKS, group=GROUP, own=OWN
                )
            return carry

        lax.fori_loop(0, STEPS, turns, jnp.int32(0))

    one_set = [
        *(VMEM(shape, jnp.dtype(NUMPY[dtype])) for _, shape, dtype in buffers),
        pltpu.SemaphoreType.DMA((plan.semaphores,)),
    ]
    (out,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((2 * STEPS, rows, WHOLE + OWN // GROUP), jnp.float32, VMEM)],
        scratch=[*one_set, *one_set],
        barrier=True,
        mode=Mode.LATE,
    )
    for number in range(2 * STEPS):
        total = in_levels(x * np.float32(1 + number), wire)
        for rank in range(RANKS):
            np.testing.assert_array_equal(out[rank, number], wanted(total, rank))


def test_in_one_shot_a_rank_adds_up_only_what_it_wants() -> None:
    x = np.random.default_rng(3).normal(size=(RANKS, 8, WHOLE + OWN)).astype(np.float32)

    def body(x: Any, out: Any, send: Any, receive: Any, sems: Any) -> None:
        s.entry_barrier(RANKS)
        out[...] = s.all_reduce_one_shot(
            x[...],
            send=send,
            receive=receive,
            send_sem=sems.at[0],
            receive_sem=sems.at[1],
            ranks=RANKS,
            group=GROUP,
            own=OWN,
        )

    (out,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((8, WHOLE + OWN // GROUP), jnp.float32, VMEM)],
        scratch=[
            VMEM(x.shape[1:], jnp.float32),
            VMEM(x.shape, jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        barrier=True,
        mode=Mode.LATE,
    )
    total = x[0]
    for rank in range(1, RANKS):
        total = total + x[rank]
    for rank in range(RANKS):
        np.testing.assert_array_equal(out[rank], wanted(total, rank))


def test_what_others_keep_does_not_travel() -> None:
    """384 columns for everybody and 4,096 of which each of eight ranks wants 512, in f32."""
    step = ExchangePlan(
        name="", kind="two_step", rows=1, columns=4480, safe_because="", group=8, scattered=4096
    )
    level = replace(step, kind="two_level", columns=scattered_columns(384, 8) + 4096)
    # One message fills tiles of 8 rows: 896 columns are 8 x 128, where 4,480 would be 8 x 640.
    assert [one.bytes for one in messages(step, 32)] == [8 * 128 * 4] * 2
    assert [one.bytes for one in messages(replace(step, scattered=0), 32)] == [8 * 640 * 4] * 2
    # Shares are 128 of 1,024 padded columns and 512 own ones; the own ones are not gathered.
    assert [one.bytes for one in messages(level, 32)] == [640 * 4, 640 * 4, 128 * 4]
