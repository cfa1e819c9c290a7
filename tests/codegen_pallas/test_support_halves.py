"""Exchanges in two halves with work between give the bits of the same exchange in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.codegen_pallas.phases_exchange import STARTS
from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import exchange_buffers
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run_ranks

RANKS, WIDTH = 4, 512
STEPS = 2  # loop steps: every buffer is used again
NUMPY = {
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I32: np.dtype(np.int32),
}
GARBAGE = 1e6  # in place of what was sent


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A kind of exchange on a set of buffers, and how its two halves are called.

    Attributes:
      plan: two-phase sums have their partial sums in a buffer, all others take values.
      buffers: references by suffix, `sems` among them.
    """

    plan: ExchangePlan
    buffers: Mapping[str, Any]

    @property
    def routine(self) -> str:
        gathers = self.plan.kind.startswith("gather")
        return "all_gather" if gathers else f"all_reduce_{self.plan.kind}"

    def whole(self, x: Any) -> jax.Array:
        given = x if self.plan.kind == "two_phase" else self._values(x)
        return self._result(getattr(s, self.routine)(given, **self._all(), **self._ranks()))

    def start(self, x: Any) -> None:
        given = x if self.plan.kind == "two_phase" else self._values(x)
        getattr(s, f"{self.routine}_start")(given, **self._first())

    def finish(self, x: Any) -> jax.Array:
        """Only a two-phase sum looks at `x` again, as the source of messages on their way."""
        kind = self.plan.kind
        given = x if kind == "two_phase" else [WIDTH] if kind.startswith("gather") else WIDTH
        arguments = {key: one for key, one in self._all().items() if key != "staged"}
        finish = getattr(s, f"{self.routine}_finish")
        return self._result(finish(given, **arguments, **self._ranks()))

    def _values(self, x: Any) -> Any:
        return [x[...]] if self.plan.kind.startswith("gather") else x[...]

    def _result(self, found: Any) -> jax.Array:
        value: jax.Array = found[0] if self.plan.kind.startswith("gather") else found
        return value

    def _ranks(self) -> dict[str, int]:
        grouped = {"group": self.plan.group} if self.plan.kind in STARTS else {}
        return {"ranks": RANKS, **grouped}

    def _all(self) -> dict[str, Any]:
        arrays = {key: one for key, one in self.buffers.items() if key != "sems"}
        sems = self.buffers["sems"]
        match self.plan.kind:
            case "two_level" | "two_step":
                return {**arrays, "sems": sems}
            case "two_phase":
                names = ("scatter_send", "scatter_receive", "gather_send", "gather_receive")
            case _:
                names = ("send", "receive")
        return {**arrays, **{f"{one}_sem": sems.at[at] for at, one in enumerate(names)}}

    def _first(self) -> dict[str, Any]:
        """What the first half is given."""
        if self.plan.kind in STARTS:
            names = (*STARTS[self.plan.kind], "sems")
            return {key: self.buffers[key] for key in names} | {"group": self.plan.group}
        second = ("send", "gathered", "gather_send_sem", "gather_receive_sem")
        left_out = second if self.plan.kind == "two_phase" else ()
        kept = {key: one for key, one in self._all().items() if key not in left_out}
        return {**kept, "ranks": RANKS}


def run_halves(
    kind: str, *, rows: int, wire: DType = DType.F32, group: int = 0, mode: Mode, keep: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What halves and whole exchanges give, `[ranks, STEPS, rows, columns]` each.

    Exchange n adds n to what the ranks hold, so that a stale buffer would show.

    Args:
      keep: the work between the halves leaves what was sent alone; else it overwrites that.
    """
    plan = ExchangePlan(
        name="", kind=kind, rows=rows, columns=WIDTH, safe_because="", group=group, wire=wire
    )
    arrays = exchange_buffers(plan, RANKS)
    names = [*(suffix for suffix, *_ in arrays), "sems"]
    x = np.random.default_rng(3).normal(size=(RANKS, rows, WIDTH)).astype(np.float32)

    def body(x: Any, halves: Any, wholes: Any, held: Any, work: Any, *scratch: Any) -> None:
        s.entry_barrier(RANKS)
        half = len(scratch) // 2
        split, joined = (
            Exchange(plan=plan, buffers=dict(zip(names, one, strict=True)))
            for one in (scratch[:half], scratch[half:])
        )

        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            held[...] = x[...] + index.astype(jnp.float32)
            split.start(held)
            work[...] = held[...] * 2.0
            if not keep:
                held[...] = work[...] + GARBAGE
            halves[index] = split.finish(held)
            held[...] = x[...] + index.astype(jnp.float32)
            wholes[index] = joined.whole(held)
            return carry

        lax.fori_loop(0, STEPS, step, jnp.int32(0))

    one_set = [
        *(VMEM(shape, jnp.dtype(NUMPY[dtype])) for _, shape, dtype in arrays),
        pltpu.SemaphoreType.DMA((plan.semaphores,)),
    ]
    columns = RANKS * WIDTH if kind.startswith("gather") else WIDTH
    halves, wholes = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((STEPS, rows, columns), jnp.float32, VMEM)] * 2,
        scratch=[*[VMEM((rows, WIDTH), jnp.float32)] * 2, *one_set, *one_set],
        barrier=True,
        mode=mode,
    )
    return halves, wholes


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.EAGER])
@pytest.mark.parametrize(
    ("kind", "rows", "wire", "group"),
    [
        ("gather", 8, DType.F32, 0),
        ("gather_f32", 1, DType.F32, 0),
        ("one_shot", 1, DType.F32, 0),
        ("two_phase", 8, DType.BF16, 0),
        ("two_level", 8, DType.F32, 2),
        ("two_level", 8, DType.BF16, 2),
        ("two_step", 1, DType.F32, 2),
        ("two_step", 1, DType.BF16, 2),
    ],
)
def test_what_is_copied_first_may_be_overwritten(
    kind: str, rows: int, wire: DType, group: int, mode: Mode
) -> None:
    """The messages are sent from buffers of the exchange, also when they leave late."""
    halves, wholes = run_halves(kind, rows=rows, wire=wire, group=group, mode=mode, keep=False)
    assert np.isfinite(wholes).all() and np.abs(wholes).max() < GARBAGE / 2
    np.testing.assert_array_equal(halves, wholes)
    assert (halves == halves[:1]).all(), "all ranks have the same bits"


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.EAGER])
def test_partial_sums_that_travel_from_where_they_are(mode: Mode) -> None:
    """Two phases of f32 send the partial sums themselves: these stay until the end."""
    halves, wholes = run_halves("two_phase", rows=8, mode=mode, keep=True)
    np.testing.assert_array_equal(halves, wholes)
    assert (halves == halves[:1]).all(), "all ranks have the same bits"


def test_partial_sums_that_are_overwritten_on_their_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is why the program may not do it: a race, that is only noted here so that the run
    ends, and wrong sums if messages leave late."""
    noted = replace(Mode.LATE.parameters(), on_race="warn")
    monkeypatch.setattr(Mode, "parameters", lambda mode: noted)
    halves, wholes = run_halves("two_phase", rows=8, mode=Mode.LATE, keep=False)
    assert "RACE DETECTED" in caplog.text
    assert not np.array_equal(halves, wholes)
