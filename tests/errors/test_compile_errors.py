"""Requests to the compiler that it cannot meet: meshes, pipelines, the TPU compiler."""

from __future__ import annotations

import pytest

import mkc.driver
from mkc.codegen_pallas.aot import AotResult
from mkc.errors import AheadOfTimeError
from mkc.errors import DeviceCountError
from mkc.errors import PassSpecError
from mkc.errors import ShardingError
from tests.errors.expect import refused
from tests.errors.small_model import Sizes
from tests.errors.small_model import compile_small


def test_more_ranks_than_devices() -> None:
    with refused(
        DeviceCountError, "tp 16", "'v6e:2x4'", "8 devices", "expected 1 to 8", "v6e:4x4, v6e:4x8"
    ):
        compile_small(tp=16)


@pytest.mark.parametrize("tp", [0, -2])
def test_no_ranks(tp: int) -> None:
    with refused(DeviceCountError, f"tp {tp}", "expected 1 to 8", "Choose one of --tp 1, 2"):
        compile_small(tp=tp)


def test_tp_that_does_not_divide_the_heads() -> None:
    """The residual width would divide; the message names the heads, which are the reason."""
    with refused(
        ShardingError,
        "small_model.py:",
        "linear: tp 3 does not divide",
        "'heads' of parameter 'model.layers.0.q.weight' (8 units of 128)",
        "tp values that work on this topology: 1, 2, 4, 6, 8. ",
        "Choose one of them with --tp",
    ):
        compile_small(Sizes(hidden=384, mlp=384, vocab=384), tp=3)


@pytest.mark.parametrize(
    ("passes", "problem"),
    [
        ("tle", "no pass 'tle'. Known: collectives, fuse, lower, prefetch, residency, shard, tile"),
        ("tile{load=1}", "pass 'tile' has no option 'load'. Known: load_bytes, ring_bytes"),
        ("tile{load_bytes=many}", "'many' is not a number"),
        ("lower{logits=yes}", "'yes' is neither True nor False"),
        ("tile{load_bytes=1", "cannot read 'tile{load_bytes=1'"),
    ],
)
def test_pipeline_text(passes: str, problem: str) -> None:
    with refused(PassSpecError, f"pass pipeline '{passes}': {problem}", "name{option=value"):
        compile_small(passes=passes)


@pytest.mark.parametrize(
    ("passes", "problem"),
    [
        ("shard{ranks=4}", "ranks of pass 'shard' is 4, but --tp decides it"),
        ("lower{rounds=4}", "rounds of pass 'lower' is 4, but --rounds-per-launch decides it"),
        ("lower{logits=True}", "logits of pass 'lower' is True, but --logits decides it"),
        ("shard{ranks=0}", "ranks is 0; expected at least 1"),
        ("lower{rounds=0}", "rounds is 0; expected at least 1"),
        ("residency{reserve_bytes=128MiB}", "leaves the kernel nothing of the 1"),
        ("residency{cache_tile=24}", "cache_tile 24 is no multiple of 16"),
        ("residency{fewest_slots=0}", "fewest_slots is 0"),
        ("residency{state_slots=1}", "state_slots is 1"),
        ("tile{step=p03}", "belong together"),
        ("tile{step=p00,step_load_bytes=65536}", "'p00' is no matmul. Known: p"),
        ("collectives{algorithm=ring}", "'ring' is none of auto, one_shot, two_phase"),
        ("fuse{narrow_columns=512}", "narrow_columns is above 256"),
    ],
)
def test_pipeline_options_without_sense(passes: str, problem: str) -> None:
    with refused(PassSpecError, f"pass pipeline '{passes}': ", problem):
        compile_small(passes=passes)


def test_the_pipeline_of_a_plan_may_be_given_back() -> None:
    plan = compile_small().plan
    assert compile_small(passes=plan["pipeline"]).plan == plan


def test_dimensions_without_a_name_are_not_called_heads() -> None:
    with refused(
        ShardingError, "dimension 'output rows' of parameter 'head.weight' (size 100)"
    ) as raised:
        compile_small(Sizes(vocab=100))
    assert "heads" not in raised.value.message


def test_every_tp_that_is_offered_works() -> None:
    """With 8 ranks a row of `down` has 24 inputs, which no memory tile holds, so 8 is left out."""
    sizes = Sizes(mlp=8 * 24)
    with refused(ShardingError, "tp values that work on this topology: 1, 2, 4. "):
        compile_small(sizes, tp=3)
    for tp in (1, 2, 4):
        assert compile_small(sizes, tp=tp).report["ranks"] == tp


def test_refusal_of_the_tpu_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines of the compiler's message are shown, not the hundreds behind them."""
    said = "\n\nINTERNAL: Mosaic failed\n" + "".join(f"  detail {n}\n" for n in range(100))

    def refuse(source: str, *, topology: str) -> AotResult:
        return AotResult(ok=False, error=said, jax="0", libtpu="0")

    monkeypatch.setattr(mkc.driver, "compile_ahead", refuse)
    with refused(
        AheadOfTimeError,
        "'v6e:2x4'",
        "expected the TPU compiler to accept",
        "The compiler said:\n  INTERNAL: Mosaic failed\n  detail 0\n",
    ) as raised:
        compile_small(aot=True)
    assert "detail 50" not in raised.value.message
