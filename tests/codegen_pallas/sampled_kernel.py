"""Kernels that sample, and what they mean, for the tests of the support functions.

A launch has several cases, one behind the other, of the same shapes and options.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.codegen_pallas.support.distribution import Sampling
from mkc.codegen_pallas.support.sampled_accept import Exchange
from mkc.codegen_pallas.support.sampled_accept import accept_sampled
from mkc.ir.acceptance import accept
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run_ranks

NOISE = 1e-5  # relative, of logits: far more than the rounding of f32 sums


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Operands of `accept` for many cases.

    Attributes:
      logits: f32 [cases, rows, vocab], or [1, rows, vocab] for all cases, as are candidates and
        proposal.
      tokens, positions: i32 [cases, rows].
      temperature, top_p, min_p: f32 [cases, batch], as is top_k i32.
      seed: i32 [cases, batch, 2].
      candidates, proposal: i32 and f32 [cases, rows, K]; None for drafts that are certain.
      forced: i32 [cases, rows], -1 for nothing.
    """

    logits: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seed: np.ndarray
    candidates: np.ndarray | None
    proposal: np.ndarray | None
    forced: np.ndarray

    @property
    def length(self) -> int:
        """Rows of a sequence."""
        return self.tokens.shape[1] // self.top_k.shape[1]


def random_drawn(
    *,
    cases: int,
    batch: int,
    length: int,
    vocab: int,
    candidates: int | None,
    options: Callable[[np.random.Generator, tuple[int, int]], dict[str, np.ndarray]],
    spread: float = 3.0,
    number: int = 0,
) -> Drawn:
    """Random logits, drafts that are drawn from random proposals, and some rows of padding.

    Args:
      options: (generator, [cases, batch]) -> temperature, top_k, top_p, min_p.
      spread: standard deviation of the logits.
    """
    random = np.random.default_rng(number)
    rows, shape = batch * length, (cases, batch)
    logits = (random.normal(size=(cases, rows, vocab)) * spread).astype(np.float32)
    real = random.integers(0, length + 1, size=(*shape, 1))
    place = np.arange(length)
    positions = np.where(place < real, random.integers(0, 9000, (*shape, 1)) + place, -1)
    # The draft of row t is a guess at what row t - 1 says.
    before = np.roll(logits, 1, axis=1)
    drawn: dict[str, Any] = {"candidates": None, "proposal": None}
    tokens = np.argmax(before, axis=2)
    if candidates is not None:
        ids = np.argsort(-before, axis=2, kind="stable")[:, :, :candidates]
        chances = random.dirichlet(np.ones(candidates), size=(cases, rows))
        chosen = (chances.cumsum(2) > random.random((cases, rows, 1))).argmax(2)
        tokens = np.take_along_axis(ids, chosen[:, :, None], axis=2)[:, :, 0]
        drawn = {"candidates": ids.astype(np.int32), "proposal": chances.astype(np.float32)}
    seed = random.integers(-(2**31), 2**31, size=(*shape, 2))
    return Drawn(
        logits=logits,
        tokens=tokens.astype(np.int32),
        positions=positions.reshape(cases, rows).astype(np.int32),
        seed=seed.astype(np.int32),
        forced=np.full((cases, rows), -1, np.int32),
        **options(random, shape),
        **drawn,
    )


def joined(parts: Sequence[Drawn]) -> Drawn:
    """The cases of all parts, one behind the other; what is for all cases is that of the first."""
    found: dict[str, Any] = {}
    for field in fields(Drawn):
        arrays = [getattr(one, field.name) for one in parts]
        alike = arrays[0] is None or len(arrays[0]) == 1
        found[field.name] = arrays[0] if alike else np.concatenate(arrays)
    return Drawn(**found)


def meaning_of(drawn: Drawn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Emitted [cases, rows], count and last [cases, batch] of the reference."""
    proposed = () if drawn.candidates is None else (drawn.candidates, drawn.proposal)
    operands = (
        drawn.logits,
        drawn.tokens,
        drawn.positions,
        drawn.temperature,
        drawn.top_k,
        drawn.top_p,
        drawn.min_p,
        drawn.seed,
        *proposed,
    )
    found = jax.jit(lambda each: lax.map(lambda one: accept(*one, rows=drawn.length), each))(
        operands
    )
    emitted, count, last = (np.asarray(one) for one in found)
    return emitted, count, last


def certain(drawn: Drawn) -> np.ndarray:
    """Which sequences [cases, batch] have a margin: noise does not change what they emit."""
    random = np.random.default_rng(99)
    emitted, _, _ = meaning_of(drawn)
    same = np.ones(drawn.top_k.shape, bool)
    for _ in range(3):
        noise = 1 + NOISE * random.normal(size=drawn.logits.shape)
        other, _, _ = meaning_of(replace(drawn, logits=(drawn.logits * noise).astype(np.float32)))
        same &= (other == emitted).reshape(*same.shape, -1).all(-1)
    return same


def run_accept(
    drawn: Drawn,
    *,
    ranks: int,
    listed: int,
    mode: Mode = Mode.GENERIC,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the kernel makes of it; every rank must say the same.

    Args:
      listed: logits of each rank that all ranks look at.
    """
    cases, rows = drawn.tokens.shape
    vocab = drawn.logits.shape[2]
    batch, columns = drawn.top_k.shape[1], vocab // ranks
    padded, height = -(-rows // 8) * 8, -(-batch // 8) * 8
    names = ("temperature", "top_k", "top_p", "min_p")

    def split(values: np.ndarray) -> np.ndarray:
        """Columns over the ranks; rows up to a multiple of 8, large columns that do not count."""
        parts = np.stack(np.split(values, ranks, axis=2))
        parts = np.pad(parts, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
        more = ((0, 0), (0, 0), (0, 0), (0, max(0, 256 - columns)))
        return np.pad(parts, more, constant_values=50.0)

    def same(values: np.ndarray) -> np.ndarray:
        return np.stack([values] * ranks)

    proposed = [] if drawn.candidates is None else [drawn.candidates, drawn.proposal]
    scalars = [drawn.tokens, drawn.positions, drawn.forced, drawn.seed.reshape(cases, -1)]
    scalars += [getattr(drawn, name) for name in names]

    def body(*refs: Any) -> None:
        logits, *refs_ = refs
        proposal = refs_[: len(proposed)]
        tokens, positions, forced, seed, *options = refs_[len(proposed) :][: len(scalars)]
        results = refs_[len(proposed) + len(scalars) :][:3]
        buffers, sems = refs_[-5:-1], refs_[-1]
        exchanges: list[Exchange | None] = [
            None
            if ranks == 1
            else Exchange(
                send=buffers[2 * index],
                receive=buffers[2 * index + 1],
                send_sem=sems.at[2],
                receive_sem=sems.at[index],
            )
            for index in range(2)
        ]
        s.entry_barrier(ranks)

        def one_case(case: jax.Array, carry: jax.Array) -> jax.Array:
            def view(ref: Any) -> s.View:
                one = 0 if ref.shape[0] == 1 else case
                return s.View(ref=ref.at[one], start=0, width=ref.shape[2])

            values, ids = s.local_top_k(view(logits), listed, columns)
            accept_sampled(
                view(logits),
                values,
                ids,
                listed=listed,
                columns=columns,
                ranks=ranks,
                sampling=Sampling(
                    seed=seed.at[case],
                    **{name: ref.at[case] for name, ref in zip(names, options, strict=True)},
                ),
                proposal=(view(proposal[0]), view(proposal[1])) if proposal else None,
                first=exchanges[0],
                second=exchanges[1],
                tokens=tokens.at[case],
                positions=positions.at[case],
                forced=forced.at[case],
                **{
                    name: ref.at[case]
                    for name, ref in zip(("emitted", "count", "last"), results, strict=True)
                },
                batch=batch,
                rows_per_sequence=drawn.length,
            )
            return carry

        lax.fori_loop(0, cases, one_case, jnp.int32(0))

    widened = [
        np.pad(one, ((0, 0), (0, padded - rows), (0, 0))) for one in proposed if one is not None
    ]
    found = run_ranks(
        body,
        operands=[
            (split(drawn.logits), VMEM),
            *[(same(one), VMEM) for one in widened],
            *[(same(one), SMEM) for one in scalars],
        ],
        results=[((cases, size), jnp.int32, SMEM) for size in (rows, batch, batch)],
        scratch=[
            VMEM((3 * padded, 128), jnp.int32),
            VMEM((ranks, 3 * padded, 128), jnp.int32),
            VMEM((2 * height, 128), jnp.int32),
            VMEM((ranks, 2 * height, 128), jnp.int32),
            pltpu.SemaphoreType.DMA((3,)),
        ],
        barrier=ranks > 1,
        mode=mode,
    )
    for one in found:
        for rank in range(1, ranks):
            np.testing.assert_array_equal(one[rank], one[0])
    emitted, count, last = (one[0] for one in found)
    return emitted, count, last
