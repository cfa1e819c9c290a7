"""What the filters keep, from lists of the largest logits, against the reference distribution."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas.support.distribution import MANY
from mkc.codegen_pallas.support.distribution import Filters
from mkc.codegen_pallas.support.distribution import find_cut
from mkc.codegen_pallas.support.distribution import keeps
from mkc.ir.acceptance import distribution
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

# temperature, top_k, top_p, min_p
COMBINATIONS = list(
    product([0.0, 0.7, 1.8], [0, 1, 20, 128, 129, 9999], [1.0, 0.85, 0.2], [0.0, 0.03, 0.6])
)
ROWS = -(-len(COMBINATIONS) // 8) * 8
PADDED = COMBINATIONS + [(1.0, 0, 1.0, 0.0)] * (ROWS - len(COMBINATIONS))
TEMPERATURE, TOP_K, TOP_P, MIN_P = np.array(PADDED, np.float32).T
HEAT = np.where(TEMPERATURE == 0, np.float32(1), TEMPERATURE)


def lists_of(logits: np.ndarray, ranks: int, listed: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest logits of each rank and their ids, `[R, 128]`."""
    values = np.full((len(logits), 128), -np.inf, np.float32)
    ids = np.full((len(logits), 128), MANY, np.int32)
    columns = logits.shape[1] // ranks
    for rank in range(ranks):
        mine = logits[:, rank * columns : (rank + 1) * columns]
        order = np.argsort(-mine, axis=1, kind="stable")[:, :listed]
        lanes = slice(rank * listed, (rank + 1) * listed)
        values[:, lanes] = np.take_along_axis(mine, order, axis=1)
        ids[:, lanes] = order + rank * columns
    return values, ids


def cuts(logits: np.ndarray, *, ranks: int, listed: int) -> tuple[np.ndarray, ...]:
    """Whether each token is kept `[R, vocab]`; mass and whether it is decided, `[R]`."""
    values, ids = lists_of(logits, ranks, listed)
    weights = np.exp((logits - logits.max(1, keepdims=True)) / HEAT[:, None])

    def body(*refs: Any) -> None:
        values, ids, mass, heat, temperature, top_k, top_p, min_p, *out = refs
        filters = Filters(
            heat=heat[...],
            greedy=temperature[...] == 0,
            top_k=top_k[...],
            top_p=top_p[...],
            min_p=min_p[...],
        )
        cut = find_cut(
            values[...],
            ids[...],
            mass[...],
            filters,
            listed=listed,
            ranks=ranks,
            columns=logits.shape[1] // ranks,
        )
        out[0][...], out[1][...], out[2][...] = cut.value, cut.id, cut.mass
        out[3][...] = jnp.where(cut.decided, 1, 0)

    columns = [HEAT, TEMPERATURE, TOP_K.astype(np.int32), TOP_P, MIN_P]
    value, id_, mass, decided = run(
        body,
        operands=[
            (values, VMEM),
            (ids, VMEM),
            (weights.sum(1, keepdims=True).astype(np.float32), VMEM),
            *[(np.tile(one[:, None], (1, 128)), VMEM) for one in columns],
        ],
        results=[((ROWS, 128), dtype, VMEM) for dtype in ("float32", "int32", "float32", "int32")],
        mode=Mode.GENERIC,
    )
    kept = keeps(logits, np.arange(logits.shape[1]), value[:, :1], id_[:, :1])
    return np.asarray(kept), mass[:, 0], decided[:, 0] > 0


def reference(logits: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    """Which tokens the reference keeps."""
    top_k = np.where(TEMPERATURE == 0, 1, TOP_K).astype(np.int32)
    operands = (logits, HEAT, top_k, top_p, MIN_P)
    return np.asarray(distribution(*(jnp.asarray(one) for one in operands))) > 0


def known_places(logits: np.ndarray, ranks: int, listed: int) -> np.ndarray:
    """How many tokens in descending order are known to be those: up to the best last entry."""
    order = np.argsort(-logits, axis=1, kind="stable")
    _, ids = lists_of(logits, ranks, listed)
    last = ids[:, listed - 1 : ranks * listed : listed]
    return (order[:, :, None] == last[:, None, :]).any(2).argmax(1) + 1


@pytest.mark.parametrize(
    ("ranks", "listed", "columns", "spread"),
    [
        pytest.param(1, 128, 600, 2.0, id="one rank"),
        pytest.param(4, 32, 100, 2.0, id="four ranks"),
        pytest.param(8, 16, 50, 0.5, id="flat"),
        pytest.param(3, 20, 20, 1.0, id="everything listed"),
    ],
)
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_a_cut_keeps_what_the_reference_keeps(
    step: float, ranks: int, listed: int, columns: int, spread: float
) -> None:
    """All combinations of filters; not decided is what the list cannot say, and nothing else."""
    random = np.random.default_rng(columns)
    logits = (random.normal(size=(ROWS, ranks * columns)) * spread).astype(np.float32)
    if step:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    kept, mass, decided = cuts(logits, ranks=ranks, listed=listed)
    wanted = reference(logits, TOP_P)
    np.testing.assert_array_equal(kept[decided], wanted[decided])

    known = known_places(logits, ranks, listed)
    bounded = reference(logits, np.ones_like(TOP_P)).sum(1)  # by top-k and min-p
    cut_by_place = (TOP_K > 0) & (logits.shape[1] > TOP_K)
    by_bounds = (bounded < known) | (cut_by_place & (known >= TOP_K))
    by_mass = wanted.sum(1) < known
    expected = np.where(cut_by_place | (MIN_P > 0), by_bounds, (TOP_P == 1) | by_mass)
    expected |= (TEMPERATURE == 0) | (listed == columns)
    np.testing.assert_array_equal(decided, expected)
    assert decided.mean() > 0.4
    assert decided.all() == (listed == columns)

    weights = np.exp((logits - logits.max(1, keepdims=True)) / HEAT[:, None]) * wanted
    np.testing.assert_allclose(mass[decided], weights.sum(1)[decided], rtol=1e-5)
