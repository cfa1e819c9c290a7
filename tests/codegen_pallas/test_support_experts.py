"""Chosen experts, loaded once each, against their reference meaning: forms of weights, rows, parts
of the inner width and of the experts, rings shorter and longer than the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import SCALE_BIAS
from mkc.ir.ops_experts import Route
from mkc.ir.ops_experts import RouterScore
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run
from tests.codegen_pallas.support_run import run_ranks
from tests.codegen_pallas.test_support_mxfp4 import packed
from tests.codegen_pallas.test_support_mxfp4 import values

LAYERS = 2
LANES = 128


def up_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


type Stored = tuple[np.ndarray, ...]
"""Matrices `[entries, N, K]` as a checkpoint has them: bf16 numbers, or codes and scales."""


def drawn(random: np.random.Generator, shape: tuple[int, int, int], fp4: bool) -> Stored:
    if not fp4:
        return ((random.normal(size=shape) / shape[2] ** 0.5).astype(ml_dtypes.bfloat16),)
    codes = random.integers(0, 256, size=(*shape[:2], shape[2] // 2), dtype=np.uint8)
    size = (*shape[:2], shape[2] // GROUP)
    scales = random.integers(SCALE_BIAS - 6, SCALE_BIAS - 3, size=size, dtype=np.uint8)
    return codes, scales


def numbers(stored: Stored) -> np.ndarray:
    """In f64."""
    if len(stored) == 1:
        return stored[0].astype(np.float64)
    return np.stack([values(*one) for one in zip(*stored, strict=True)])


def kept(matrices: Sequence[Stored], part: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """What one of `parts` ranks keeps of gate, up and down."""
    gate, up = (
        tuple(np.split(one, parts, axis=1)[part] for one in stored) for stored in matrices[:2]
    )
    down = tuple(np.split(one, parts, axis=2)[part] for one in matrices[2])
    width = gate[0].shape[1]
    behind = [(0, 0), (0, 0), (0, up_to(2 * width, LANES) - 2 * width)]
    if len(gate) == 1:
        both = np.concatenate([np.swapaxes(one[0], 1, 2) for one in (gate, up)], axis=2)
        return np.pad(both, behind), np.swapaxes(down[0], 1, 2)
    both = np.concatenate([packed(*one) for one in (gate, up)], axis=2)
    missing = up_to(width, 64) - width
    whole = (
        np.pad(one, [(0, 0), (0, 0), (0, missing // each)])
        for one, each in zip(down, (2, GROUP), strict=True)
    )
    return np.pad(both, behind), packed(*whole)


class Experts:
    """Random matrices of `LAYERS * count` experts."""

    def __init__(self, random: np.random.Generator, *, count: int, m: int, w: int, fp4: bool):
        shape = (LAYERS * count,)
        self.stored = [drawn(random, (*shape, *one), fp4) for one in ((w, m), (w, m), (m, w))]
        self.gate, self.up, self.down = map(numbers, self.stored)

    def output(self, entry: int, x: np.ndarray, caps: tuple[float | None, ...]) -> np.ndarray:
        """Of one expert, `[rows, m]`, in f64 but for the gated value."""

        def capped(z: np.ndarray, cap: float | None) -> np.ndarray:
            return z if cap is None else cap * np.tanh(z / cap)

        gate, up = x @ self.gate[entry].T, x @ self.up[entry].T
        gated = capped(gate, caps[0]) / (1 + np.exp(-gate)) * capped(up, caps[1])
        return gated.astype(ml_dtypes.bfloat16).astype(np.float64) @ self.down[entry].T


@pytest.mark.parametrize(
    ("fp4", "rows", "m", "w", "slots", "mode"),
    [
        pytest.param(True, 1, 320, 96, 2, Mode.LATE, id="fp4, one row"),
        pytest.param(True, 8, 256, 64, 3, Mode.LATE, id="fp4, eight rows"),
        pytest.param(True, 3, 128, 192, 4, Mode.GENERIC, id="fp4, three rows"),
        pytest.param(False, 1, 256, 40, 2, Mode.EAGER, id="bf16, one row"),
        pytest.param(False, 8, 128, 128, 4, Mode.LATE, id="bf16, eight rows"),
    ],
)
@pytest.mark.parametrize("chosen", [[], [2], [0, 1, 3, 5, 6]], ids=["none", "one", "five"])
def test_expert_mlp(
    fp4: bool, rows: int, m: int, w: int, slots: int, mode: Mode, chosen: list[int]
) -> None:
    """This rank has experts 8 .. 15; others are chosen too. Rows that do not count are NaN."""
    random = np.random.default_rng(m)
    first, local, k, caps = 8, 8, 6, (4.0, None)
    experts = Experts(random, count=local, m=m, w=w, fp4=fp4)
    height = up_to(rows, 8)
    x = random.normal(size=(height, m)).astype(ml_dtypes.bfloat16).astype(np.float32)
    x[rows:] = np.nan
    ids = np.zeros((height, k), np.int32)
    for row in range(rows):  # row 0 chooses all; the others some
        mine = [first + one for number, one in enumerate(chosen) if row in (0, number)]
        ids[row] = [*mine, *range(k - len(mine))]
    weights = random.uniform(0.5, 1, size=(height, k)).astype(np.float32)
    table = np.zeros((8, LANES), np.int32)
    table[0, : len(chosen)], table[1, 0] = chosen, len(chosen)

    def body(table: Any, x: Any, ids: Any, weights: Any, *rest: Any) -> None:
        gate_up, down, out, gate_up_ring, down_ring, arrived, left = rest
        store = s.ExpertStore(
            gate_up_hbm=gate_up,
            down_hbm=down,
            gate_up_ring=gate_up_ring,
            down_ring=down_ring,
            arrived=arrived,
            chosen=table,
            left=left if fp4 else None,
            local=local,
            slots=slots,
        )

        def layer(index: jax.Array, carry: jax.Array) -> jax.Array:
            s.experts_start(store, index)
            s.expert_mlp(
                store,
                index,
                x=s.View(ref=x, start=0, width=m),
                ids=s.View(ref=ids, start=0, width=k),
                weights=s.View(ref=weights, start=0, width=k),
                out=s.View(ref=out.at[index], start=0, width=m),
                first=first,
                rows=rows,
                width=w,
                gate_cap=caps[0],
                up_cap=caps[1],
            )
            return carry

        lax.fori_loop(0, LAYERS, layer, jnp.int32(0))

    stored = kept(experts.stored, 0, 1)
    (out,) = run(
        body,
        operands=[
            (table, SMEM),
            (x, VMEM),
            (ids, VMEM),
            (weights, VMEM),
            *[(one, HBM) for one in stored],
        ],
        results=[((LAYERS, height, m), jnp.float32, VMEM)],
        scratch=[
            *[VMEM((slots, *one.shape[1:]), one.dtype) for one in stored],
            pltpu.SemaphoreType.DMA((slots,)),
            VMEM(s.left_shape(rows, m), jnp.bfloat16),
        ],
        mode=mode,
    )
    for layer in range(LAYERS):
        expected = np.zeros((rows, m))
        for one in chosen:
            weight = np.where(ids[:rows] == first + one, weights[:rows], 0).sum(1, keepdims=True)
            expected += weight * experts.output(layer * local + one, x[:rows], caps)
        # a gated value next to a border of bf16 may round to either side
        size = max(np.abs(expected).max(), 1)
        np.testing.assert_allclose(out[layer, :rows], expected, rtol=2**-7, atol=2**-10 * size)
        np.testing.assert_array_equal(out[layer, rows:], 0)


def test_ranks_share_the_experts() -> None:
    check_shared_experts(Mode.LATE)


def check_shared_experts(mode: Mode) -> None:
    """Router and experts on four ranks, two groups of experts with halves of the inner width: the
    sum over the ranks is that of all experts."""
    random = np.random.default_rng(0)
    groups, parts, rows, count, k, m, w = 2, 2, 3, 16, 4, 128, 64
    local, ranks, slots = count // groups, groups * parts, 2
    experts = Experts(random, count=count, m=m, w=w, fp4=True)
    x = random.normal(size=(8, m)).astype(ml_dtypes.bfloat16).astype(np.float32)
    logits = random.normal(size=(8, count)).astype(np.float32)
    stored = []
    for rank in range(ranks):
        group, part = divmod(rank, parts)
        mine = [
            tuple(
                one.reshape(LAYERS, count, *one.shape[1:])[
                    :, group * local : (group + 1) * local
                ].reshape(LAYERS * local, *one.shape[1:])
                for one in matrix
            )
            for matrix in experts.stored
        ]
        stored.append(kept(mine, part, parts))

    def body(logits: Any, x: Any, *rest: Any) -> None:
        gate_up, down, out, gate_up_ring, down_ring, arrived, left, ids, weights, *rest = rest
        places, landing, chosen, sem = rest
        first = lax.axis_index("tp") // parts * local
        choices = {
            "ids": s.View(ref=ids, start=0, width=k),
            "weights": s.View(ref=weights, start=0, width=k),
        }
        store = s.ExpertStore(
            gate_up_hbm=gate_up,
            down_hbm=down,
            gate_up_ring=gate_up_ring,
            down_ring=down_ring,
            arrived=arrived,
            chosen=chosen,
            left=left,
            local=local,
            slots=slots,
        )
        s.route(
            s.View(ref=logits, start=0, width=count),
            None,
            space=places if rows > 8 else None,
            landing=landing,
            chosen=chosen,
            sem=sem,
            rows=rows,
            k=k,
            score=RouterScore.SIGMOID,
            renormalise=True,
            factor=1.0,
            first=first,
            local=local,
            **choices,
        )
        s.experts_start(store, 1)
        s.expert_mlp(
            store,
            1,
            x=s.View(ref=x, start=0, width=m),
            out=s.View(ref=out, start=0, width=m),
            first=first,
            rows=rows,
            width=w // parts,
            gate_cap=4.0,
            up_cap=25.0,
            **choices,
        )

    both = [np.stack(one) for one in zip(*stored, strict=True)]
    (out,) = run_ranks(
        body,
        operands=[
            (np.stack([logits] * ranks), VMEM),
            (np.stack([x] * ranks), VMEM),
            *[(one, HBM) for one in both],
        ],
        results=[((8, m), jnp.float32, VMEM)],
        scratch=[
            *[VMEM((slots, *one.shape[2:]), one.dtype) for one in both],
            pltpu.SemaphoreType.DMA((slots,)),
            VMEM(s.left_shape(rows, m), jnp.bfloat16),
            VMEM((8, k), jnp.int32),
            VMEM((8, k), jnp.float32),
            VMEM((8, count), jnp.float32),
            VMEM((8, LANES), jnp.int32),
            SMEM((8, LANES), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        mode=mode,
    )
    op = Route(k=k, score=RouterScore.SIGMOID, renormalise=True)
    (ids, weights), _ = meaning(op, (logits[:rows],))
    expected = np.zeros((rows, m))
    for one in range(count):
        weight = np.where(ids == one, weights, 0).sum(1, keepdims=True)
        expected += weight * experts.output(count + one, x[:rows], (4.0, 25.0))
    error = 2**-9 * np.abs(expected).max()
    np.testing.assert_allclose(out.sum(0)[:rows], expected, rtol=2**-7, atol=error)
