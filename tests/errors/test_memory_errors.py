"""What does not fit: VMEM, device memory, memory tiles, contexts, batches."""

from __future__ import annotations

from re import findall

import pytest

from mkc.errors import BatchError
from mkc.errors import ContextError
from mkc.errors import HbmError
from mkc.errors import HbmPart
from mkc.errors import HbmPlanError
from mkc.errors import LiveBuffer
from mkc.errors import RoundsError
from mkc.errors import TileError
from mkc.errors import VmemError
from mkc.errors.memory import LARGEST_LIVE
from mkc.targets import load_target
from tests.errors.expect import refused
from tests.errors.small_model import Sizes
from tests.errors.small_model import compile_small

MIB = 1 << 20
GIB = 1 << 30


def test_the_small_model_fits() -> None:
    assert compile_small().report["ranks"] == 8


# VMEM.


def test_activations_that_exceed_vmem() -> None:
    """Rows of 2^20 values do not fit; the message says which buffers are the large ones."""
    with pytest.raises(VmemError) as raised:
        compile_small(Sizes(hidden=1 << 20, mlp=128, vocab=128), batch=8)
    error = raised.value
    needed, limit, over = (float(one) for one in findall(r"([\d.]+) MiB", str(error))[:3])
    assert needed - limit == pytest.approx(over, abs=0.02)
    assert limit == pytest.approx(error.limit_bytes / MIB, abs=0.01)
    assert error.limit_bytes < load_target("v6e:2x4").vmem.usable_bytes
    assert sum(one.bytes for one in error.live) == error.needed_bytes
    with refused(
        VmemError,
        "Cheapest change: a narrower model; no other tp of this target or smaller batch lets it",
        *(f"  {one.name}  ({one.op})" for one in error.live[:LARGEST_LIVE]),
    ):
        raise error


def test_reserve_that_leaves_nothing() -> None:
    with refused(VmemError, "MiB too much", "Cheapest change:", "tape_ring  (weight stream)"):
        compile_small(passes="residency{reserve_bytes=127MiB}")


def test_the_advice_for_a_large_reserve_works() -> None:
    with refused(VmemError, "Cheapest change: the default options of the passes, with which"):
        compile_small(passes="residency{reserve_bytes=127MiB}")


def test_the_advice_of_a_smaller_batch_works() -> None:
    """Each sequence reads its own block of embedding rows, here of 12 MiB."""
    sizes = Sizes(hidden=393216, mlp=128, vocab=128, heads=1, kv_heads=1)
    with pytest.raises(VmemError) as raised:
        compile_small(sizes, batch=8, tp=1)
    advised = findall(r"Cheapest change: --(tp|batch) (\d+), with which", str(raised.value))
    ((option, value),) = advised
    assert compile_small(sizes, **({"batch": 8, "tp": 1} | {option: int(value)})).report


def test_live_buffers_are_listed_by_size() -> None:
    live = [
        LiveBuffer(name="hidden", op="embed", bytes=MIB),
        LiveBuffer(name="tape_ring", op="weight stream", bytes=40 * MIB),
        LiveBuffer(name="gate", op="linear", bytes=24 * MIB),
    ]
    with refused(
        VmemError,
        "needs 65.00 MiB of VMEM, the limit is 60.00 MiB: 5.00 MiB too much",
        "40.00 MiB  tape_ring  (weight stream)\n     24.00 MiB  gate  (linear)\n",
    ):
        raise VmemError(
            needed_bytes=65 * MIB, limit_bytes=60 * MIB, live=live, cheapest_change="fewer rows"
        )


def test_many_live_buffers_are_cut() -> None:
    """A kernel of a deep model has hundreds, and names of everything that shares a buffer."""
    live = [
        LiveBuffer(name=f"region_{one:02}", op="values " + "o_proj; " * 99, bytes=(40 - one) * MIB)
        for one in range(20)
    ]
    error = VmemError(needed_bytes=MIB, limit_bytes=MIB, live=live, cheapest_change="fewer rows")
    _, heading, *lines = str(error).splitlines()
    assert heading == "Buffers live at the peak:"
    assert [line.split()[2] for line in lines[:-1]] == [f"region_{one:02}" for one in range(12)]
    assert max(map(len, lines)) < 100
    assert lines[-1].split() == ["196.00", "MiB", "in", "8", "smaller", "buffers"]


# Device memory.


def test_weights_that_exceed_one_device() -> None:
    """20 GiB of embedding and LM head: half of the head fits a device of 16 GiB, the whole not."""
    sizes = Sizes(hidden=4096, vocab=1 << 20)
    with pytest.raises(HbmError) as raised:
        compile_small(sizes, target="v5e:1x1")
    needed, weights, states, limit, over = (
        float(one) for one in findall(r"([\d.]+) GiB", str(raised.value))
    )
    assert needed == pytest.approx(weights + states, abs=0.02)
    assert needed - limit == pytest.approx(over, abs=0.02)
    with refused(HbmError, "'v5e:1x1'", "Use --target v5e:2x2, with which they fit."):
        raise raised.value
    assert compile_small(sizes, target="v5e").target.name == "v5e:2x2"


def test_caches_that_exceed_every_topology() -> None:
    """What is told has been tried; twice that context would be too much."""
    sizes, context = Sizes(dim=1024), 1 << 24
    with pytest.raises(HbmError) as raised:
        compile_small(sizes, target="v5e:1x1", batch=8, context=context)
    ((option, value),) = findall(r"Use --(\w+) (\d+), with which they fit", str(raised.value))
    assert option == "context"
    assert compile_small(sizes, target="v5e:1x1", batch=8, context=int(value)).report
    with pytest.raises(HbmError):
        compile_small(sizes, target="v5e:1x1", batch=8, context=2 * int(value))


@pytest.mark.parametrize("size", ["hidden", "mlp", "vocab", "heads", "dim"])
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(size: str) -> None:
    with refused(HbmError, "No topology of this target holds them"):
        compile_small(Sizes(**{size: 8 * 10**12}))


def test_weights_that_exceed_every_topology() -> None:
    """A shorter context would not help."""
    with refused(HbmError, "holds them; use a smaller model or another target."):
        compile_small(Sizes(vocab=8 * 10**9))


def test_what_serving_takes_is_listed_by_size() -> None:
    parts = [
        HbmPart(name="one saved slot", bytes=0, origin="from its shapes"),
        HbmPart(name="prefill workspace", bytes=GIB, origin="computed from the graph"),
        HbmPart(name="weight tape", bytes=15 * GIB, origin="from its shapes"),
    ]
    with refused(
        HbmPlanError,
        "'v5e:1x1': serving the model takes 16.00 GiB of each device's memory, and it has 15.75",
        "0.25 GiB too much. Lower --context",
        "15.00 GiB  weight tape  (from its shapes)\n      1.00 GiB  prefill workspace  (computed",
    ):
        raise HbmPlanError(target="v5e:1x1", limit_bytes=63 * GIB // 4, parts=parts)


@pytest.mark.parametrize("batch", [1, 8])
def test_more_tokens_per_launch_than_scalar_memory_holds(batch: int) -> None:
    with pytest.raises(RoundsError) as raised:
        compile_small(batch=batch, rounds=10**12)
    (limit,) = (int(one) for one in findall(r"expected 1 to (\d+)", str(raised.value)))
    assert 0 < limit * batch * 4 < load_target("v6e:2x4").smem.usable_bytes
    assert compile_small(batch=batch, rounds=limit).report["rounds_per_launch"] == limit
    with refused(RoundsError, f"{limit + 1} rounds", f"batch {batch}", "--rounds-per-launch"):
        compile_small(batch=batch, rounds=limit + 1)


# Shapes that cannot be laid out.


def test_inner_size_that_does_not_fill_memory_tiles() -> None:
    with refused(
        TileError,
        "small_model.py:",
        "linear: parameter 'model.layers.0.down.weight' has 24 input columns on each rank",
        "a multiple of 16",
        "Choose --tp 4, with which every rank has whole tiles.",
    ):
        compile_small(Sizes(mlp=8 * 24))
    assert compile_small(Sizes(mlp=8 * 24), tp=4).report["ranks"] == 4


def test_inner_size_that_fits_no_mesh() -> None:
    """The residual width is contracted whole on every rank, so no tp helps."""
    with refused(
        TileError,
        "has 100 input columns",
        "Make the whole dimension, which is 100, a multiple of 16.",
    ):
        compile_small(Sizes(hidden=100))
    with refused(TileError, "dimension, which is 200, a multiple of 16."):
        compile_small(Sizes(mlp=200), tp=1)


@pytest.mark.parametrize(("context", "nearest"), [(100, 112), (8, 16), (4097, 4112)])
def test_context_that_is_no_multiple_of_a_cache_tile(context: int, nearest: int) -> None:
    with refused(ContextError, f"context {context}", "a multiple of 16", f"Use {nearest}."):
        compile_small(context=context)


@pytest.mark.parametrize("context", [0, -16])
def test_context_that_is_not_positive(context: int) -> None:
    with refused(ContextError, f"context {context}", "at least one position", "--context"):
        compile_small(context=context)


@pytest.mark.parametrize("batch", [-1, 0, 9])
def test_batch_outside_the_range(batch: int) -> None:
    with refused(BatchError, f"batch {batch}", "1 to 8", "Choose a batch in that range"):
        compile_small(batch=batch)
