"""Model functions that build no graph, and graphs that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import mkc
from mkc.errors import GraphError
from mkc.errors import ParamNameError
from mkc.errors import ShapeError
from mkc.errors import TraceError
from mkc.errors import UnsupportedOpError
from mkc.ir.graph import Graph
from mkc.ir.ops import Op
from mkc.ir.verify import verify
from tests.errors.expect import refused
from tests.ir.small_graph import small_graph

HIDDEN, VOCAB = 16, 32
FILE = Path(__file__).name  # what stands before it depends on the working directory


def trace(function: Callable[..., mkc.Outputs]) -> Graph:
    return mkc.trace(function, name="tried", batch=1, context=16)


def line(marker: str) -> str:
    """`file:line: ` of the line of this file that ends in the comment `# marker`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (at for at, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))
    return f"{FILE}:{number}: "


def table() -> mkc.Tensor:
    return mkc.param("embed.weight", [VOCAB, HIDDEN])


def embedded(step: mkc.Step) -> mkc.Tensor:
    return mkc.embed(step.tokens, table())


# Shapes.


def test_projection_of_another_width() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        weight = mkc.param("up.weight", [64, 24])
        h = mkc.linear(embedded(step), weight)  # another width
        return mkc.next_token(h, table())

    with refused(
        ShapeError, line("another width"), "linear", "in = 16", "bf16[64, 24]", "second axis"
    ):
        trace(decoder)


def test_sum_of_two_shapes() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = embedded(step)
        h = h + mkc.linear(h, mkc.param("up.weight", [64, HIDDEN]))  # two shapes
        return mkc.next_token(h, table())

    with refused(ShapeError, line("two shapes"), "binary", "bf16[1, 16]", "bf16[1, 64]"):
        trace(decoder)


def test_heads_of_a_plain_axis_of_parts() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        parts = mkc.concat_axes([mkc.heads(2, 8), mkc.heads(1, 8)])
        h = mkc.linear(embedded(step), mkc.param("qk.weight", [parts, HIDDEN]))
        mkc.split_heads(h)  # heads of two parts
        return mkc.next_token(embedded(step), table())

    with refused(ShapeError, line("heads of two parts"), "split_heads", "mkc.split_parts first"):
        trace(decoder)


def test_query_heads_that_key_heads_do_not_divide() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = embedded(step)
        for layer in mkc.layers(1):
            q = mkc.split_heads(mkc.linear(h, layer.param("q", [mkc.heads(3, 8), HIDDEN])))
            k = mkc.split_heads(mkc.linear(h, layer.param("k", [mkc.heads(2, 8), HIDDEN])))
            cache = layer.kv_cache("kv", 2, 8)
            mkc.attention(q, k, k, positions=step.positions, cache=cache, scale=1.0)  # heads
        return mkc.next_token(h, table())

    with refused(ShapeError, line("heads"), "attention", "2 kv heads divide", "got 3", "head coun"):
        trace(decoder)


def test_parameter_with_an_axis_that_is_no_size() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        mkc.param("strange.weight", [VOCAB, 0])  # no size
        return mkc.next_token(embedded(step), table())

    with refused(ShapeError, line("no size"), "'strange.weight'", "positive integers", "got 0"):
        trace(decoder)


# Use of the tracing interface.


def test_condition_on_a_value() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = embedded(step)
        if h:  # condition
            h = h + h
        return mkc.next_token(h, table())

    with refused(
        TraceError, line("condition"), "not known while the graph is built", "layer.index"
    ):
        trace(decoder)


def test_number_as_an_operand() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        return mkc.next_token(embedded(step) * 2.0, table())  # number

    with refused(TraceError, line("number"), "an operand is 2.0", "mkc.scale"):
        trace(decoder)


def test_call_outside_a_trace() -> None:
    with refused(TraceError, line("outside"), "no graph is being built", "Move the call"):
        mkc.param("embed.weight", [VOCAB, HIDDEN])  # outside


def test_value_of_another_graph() -> None:
    kept: list[mkc.Tensor] = []

    def first(step: mkc.Step) -> mkc.Outputs:
        kept.append(embedded(step))
        return mkc.next_token(kept[0], table())

    def second(step: mkc.Step) -> mkc.Outputs:
        return mkc.next_token(embedded(step) + kept[0], table())  # other graph

    trace(first)
    with refused(TraceError, line("other graph"), "belongs to another graph"):
        trace(second)


def test_loop_over_layers_inside_another() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = embedded(step)
        for _ in mkc.layers(2):
            for layer in mkc.layers(2):  # inner loop
                h = h + layer.param("bias", [HIDDEN])
        return mkc.next_token(h, table())

    with refused(TraceError, line("inner loop"), "mkc.layers", "inside another one", "Python loop"):
        trace(decoder)


def test_function_that_returns_something_else() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        return embedded(step)  # type: ignore[return-value]

    with refused(TraceError, FILE, "returned Tensor", "mkc.Outputs", "mkc.next_token"):
        trace(decoder)


def test_function_with_other_arguments() -> None:
    def decoder(step: mkc.Step, depth: int) -> mkc.Outputs:
        raise AssertionError(f"must not run: {step}, {depth}")

    with refused(TraceError, FILE, "takes 2 arguments", "function(step)"):
        trace(decoder)


# Names.


def test_one_name_with_two_forms() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = embedded(step)
        mkc.param("embed.weight", [VOCAB, 8])  # two forms
        return mkc.next_token(h, table())

    with refused(
        ParamNameError, line("two forms"), "'embed.weight'", "bf16[32, 8]", "earlier as", "[32, 16]"
    ):
        trace(decoder)


def test_prefix_without_a_layer_number() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        for _ in mkc.layers(2, prefix="layers."):  # prefix
            pass
        return mkc.next_token(embedded(step), table())

    with refused(ParamNameError, line("prefix"), "'layers.'", "has no {index}", "Write {index}"):
        trace(decoder)


def test_unknown_dtype() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        mkc.param("half.weight", [HIDDEN], "f16")  # dtype
        return mkc.next_token(embedded(step), table())

    with refused(
        ParamNameError, line("dtype"), "'half.weight'", "'f16'", "bf16, e2m1x2, e8m0, f32, i32"
    ):
        trace(decoder)


# Graphs and ops.


def test_graph_that_the_verifier_rejects() -> None:
    graph = replace(small_graph(), outputs={"next_token": "lost"})
    with refused(
        GraphError, "output 'next_token'", "%lost is not defined", "a value defined earli"
    ):
        verify(graph)


@dataclass(frozen=True, kw_only=True)
class Foreign(Op):
    mnemonic: ClassVar[str] = "test.foreign"


def test_op_that_is_not_registered() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        (h,) = mkc.apply(Foreign(), embedded(step))  # foreign op
        return mkc.next_token(h, table())

    with refused(
        UnsupportedOpError, line("foreign op"), "'test.foreign'", "shape inference", "register_op"
    ):
        trace(decoder)
