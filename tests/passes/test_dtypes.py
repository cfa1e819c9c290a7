"""Element types: what the kernel would have to round is refused, what it need not round is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkc
from mkc.errors import ShapeError
from mkc.ir.types import DType
from tests.passes.lowering import lower
from tests.passes.test_meaning import assert_same_meaning

HIDDEN = 256


def with_f32(place: str) -> Callable[[mkc.Step], mkc.Outputs]:
    """A model with f32 where the kernel works with bf16."""

    def dtype(name: str) -> mkc.DType:
        return mkc.F32 if name == place else mkc.BF16

    def function(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [512, HIDDEN], dtype("table"))
        h = mkc.cast(mkc.embed(step.tokens, table), "bf16")
        for layer in mkc.layers(2):
            x = mkc.cast(h, dtype("x"))
            weight = layer.param("up.weight", [mkc.heads(2, 128), HIDDEN], dtype("weight"))
            q = mkc.split_heads(mkc.linear(x, weight, dtype=dtype("q")))
            k = mkc.cast(q, dtype("cache"))
            state = [
                layer.state(f"kv.{one}", "kv_cache", [64, 2, 128], dtype("cache")) for one in "kv"
            ]
            cache = mkc.KvCache(key=state[0], value=state[1])
            o = mkc.attention(q, k, k, positions=step.positions, cache=cache, scale=1.0)
            down = layer.param("down.weight", [HIDDEN, mkc.heads(2, 128)])
            h = h + mkc.linear(mkc.cast(mkc.merge_heads(o), "bf16"), down)
        return mkc.next_token(h, mkc.param("head.weight", [512, HIDDEN]))

    return function


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("table", "embed: expected table in bf16, .*, got f32.512, 256."),
        ("x", "linear: expected x in bf16, .*, got f32.1, 256."),
        ("weight", "linear: expected weight in bf16, .*, got f32.256, 256."),
        ("q", "attention: expected q in bf16, .*, got f32.1, 2, 128."),
        ("cache", r"attention: expected state \S+kv.k in bf16, .*, got f32.64, 2, 128."),
    ],
)
def test_f32_where_the_kernel_has_bf16(place: str, message: str) -> None:
    graph = mkc.trace(with_f32(place), name="f32", batch=1, context=64)
    with pytest.raises(ShapeError, match=message) as raised:
        lower(graph, 2)
    assert "test_dtypes.py:" in str(raised.value)
    assert "round it with mkc.cast before the operation" in str(raised.value)


def test_the_same_model_in_bf16_is_accepted() -> None:
    assert_same_meaning(lower(mkc.trace(with_f32(""), name="bf16", batch=1, context=64), 2))


def f32_residual(step: mkc.Step) -> mkc.Outputs:
    """The residual stream is f32; only what enters a projection is rounded."""
    h = mkc.cast(mkc.embed(step.tokens, mkc.param("embed.weight", [512, HIDDEN])), "f32")
    for layer in mkc.layers(3):
        up = mkc.linear(mkc.cast(h, "bf16"), layer.param("up.weight", [mkc.axis(512), HIDDEN]))
        down = layer.param("down.weight", [HIDDEN, mkc.axis(512)])
        h = h + mkc.linear(mkc.silu(up), down, dtype="f32")
    return mkc.next_token(mkc.cast(h, "bf16"), mkc.param("head.weight", [512, HIDDEN]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_f32_values_stay_f32(ranks: int) -> None:
    """In memory and in the sum over the ranks."""
    one = lower(mkc.trace(f32_residual, name="residual", batch=1, context=64), ranks)
    assert_same_meaning(one)
    carried = next(buffer for buffer in one.program.buffers if "_out" in buffer.purpose)
    assert carried.dtype is DType.F32
    sums = [phase for phase in one.program.phases() if type(phase).__name__ == "AllReducePhase"]
    assert [phase.rounds for phase in sums] == [False] * (ranks - 1)  # type: ignore[attr-defined]
