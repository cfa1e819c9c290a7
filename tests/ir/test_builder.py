"""Tracing: what a model's Python records, and the messages for Python that records no graph."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import mkc
from mkc.errors import MkcError
from mkc.errors import ParamNameError
from mkc.errors import ShapeError
from mkc.errors import TraceError
from mkc.ir.graph import Node
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import Cast
from mkc.ir.types import Part
from mkc.ir.types import tensor
from mkc.ir.verify import verify

HIDDEN, VOCAB = 8, 16


def trace(body: Callable[[mkc.Step, mkc.Tensor], mkc.Tensor], batch: int = 1) -> mkc.Graph:
    """The graph of embedding, `body` and LM head."""

    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        return mkc.next_token(body(step, h), mkc.param("lm_head.weight", [VOCAB, HIDDEN]))

    graph = mkc.trace(function, name="small", batch=batch, context=32)
    verify(graph)
    return graph


def line_of(text: str) -> int:
    """Line of this file with `# text` at its end."""
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}"))


def test_a_graph_has_the_steps_inputs_and_outputs() -> None:
    graph = trace(lambda step, h: h, batch=3)
    assert (graph.name, graph.rows, graph.batch, graph.context) == ("small", 3, 3, 32)
    assert [(one.name, str(one.type)) for one in graph.inputs] == [
        ("tokens", "i32[3]"),
        ("positions", "i32[3]"),
    ]
    assert graph.outputs == {"next_token": "argmax", "logits": "lm_head"}
    assert list(graph.params) == ["embed.weight", "lm_head.weight"]


def test_values_are_named_after_parameters_and_ops() -> None:
    graph = trace(lambda step, h: mkc.silu(h) * h + h)
    names = [result.name for node in graph.body.nodes() for result in node.results]
    assert names == ["embed", "silu", "mul", "add", "lm_head", "argmax"]


def test_a_node_knows_the_authors_line() -> None:
    graph = trace(lambda step, h: mkc.exp(h))  # here
    node = next(node for node in graph.body.nodes() if node.results[0].name == "exp")
    assert node.location is not None
    assert node.location.file.endswith("test_builder.py")
    assert node.location.line == line_of("here")


def test_naming_a_parameter_twice_ties_it() -> None:
    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        return mkc.next_token(h, mkc.param("embed.weight", [VOCAB, HIDDEN]))

    graph = mkc.trace(function, name="tied", batch=1, context=32)
    assert list(graph.params) == ["embed.weight"]


def test_arithmetic_is_element_wise_in_the_wider_dtype() -> None:
    graph = trace(lambda step, h: mkc.cast(mkc.cast(h, "f32") - h, "bf16"))
    nodes = {node.results[0].name: node for node in graph.body.nodes()}
    assert nodes["sub"].op == Binary(function=BinaryKind.SUB)
    assert str(nodes["sub"].results[0].type) == f"f32[1, {HIDDEN}]"
    assert nodes["cast_2"].op == Cast(dtype=mkc.BF16)


def test_a_kv_cache_is_two_states_of_the_steps_context() -> None:
    def body(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
        for layer in mkc.layers(1):
            x = mkc.split_heads(mkc.linear(h, layer.param("q", [mkc.heads(2, 4), HIDDEN])))
            cache = layer.kv_cache("kv", 2, 4)
            o = mkc.attention(x, x, x, positions=step.positions, cache=cache, scale=0.5)
            h = h + mkc.merge_heads(o)
        return h

    graph = trace(body)
    assert [(key, str(one.type)) for key, one in graph.states.items()] == [
        ("model.layers.0.kv.key", "bf16[32, 2, 4]"),
        ("model.layers.0.kv.value", "bf16[32, 2, 4]"),
    ]


def test_parts_stay_apart_through_a_projection() -> None:
    """q, k and v of one fused weight keep their heads."""
    q, kv = mkc.heads(4, 2), mkc.heads(2, 2)

    def body(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
        fused = mkc.linear(h, mkc.param("qkv", [mkc.concat_axes([q, kv, kv]), HIDDEN]))
        parts = mkc.split_parts(fused)
        assert [part.type.axes[1].parts for part in parts] == [
            (Part(count=4, unit=2),),
            (Part(count=2, unit=2),),
            (Part(count=2, unit=2),),
        ]
        split = mkc.split_heads(parts[0])
        assert split.shape == (1, 4, 2)
        assert split.type.axes[1].parts[0].copyable
        merged = mkc.merge_heads(split)
        assert merged.type.axes[1].same_layout(q)
        assert merged.type.axes[1].parts[0].copyable
        return merged

    trace(body)


def test_heads_may_be_copied_and_plain_axes_may_not() -> None:
    """Two types that differ in nothing else stay two types."""

    def body(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
        plain = mkc.linear(h, mkc.param("plain", [HIDDEN, HIDDEN]))
        units = mkc.linear(h, mkc.param("units", [mkc.heads(HIDDEN, 1), HIDDEN]))
        assert not plain.type.axes[1].parts[0].copyable
        assert units.type.axes[1].parts[0].copyable
        return plain + units

    trace(body)


def test_any_registered_op_can_be_recorded() -> None:
    graph = trace(lambda step, h: mkc.apply(Cast(dtype=mkc.BF16), h)[0])
    assert any(isinstance(node.op, Cast) for node in graph.body.nodes())


def test_a_config_comes_first() -> None:
    def function(config: str, step: mkc.Step) -> mkc.Outputs:
        assert config == "sizes"
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        return mkc.next_token(h, mkc.param("embed.weight", [VOCAB, HIDDEN]))

    assert mkc.trace(function, name="m", batch=1, context=4, config="sizes").name == "m"


def test_leaving_the_loop_early_keeps_what_was_recorded() -> None:
    def body(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
        for layer in mkc.layers(10):
            if layer.index == 2:
                break
            h = mkc.linear(h, layer.param("w", [HIDDEN, HIDDEN]))
        return mkc.scale(h, 2.0)

    graph = trace(body)
    assert graph.params["model.layers.{index}.w"].indices == (0, 1)
    outside = [item.op.mnemonic for item in graph.body.items if isinstance(item, Node)]
    assert outside == ["embed", "scale", "linear", "argmax"]


def nested_loops(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
    for _ in mkc.layers(2):
        for layer in mkc.layers(2):
            h = mkc.linear(h, layer.param("w", [HIDDEN, HIDDEN]))
    return h


def two_shapes_of_one_name(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
    mkc.param("w", [HIDDEN, HIDDEN])
    return mkc.linear(h, mkc.param("w", [2 * HIDDEN, HIDDEN]))


def prefix_without_index(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
    for layer in mkc.layers(2, prefix="layers."):
        h = mkc.linear(h, layer.param("w", [HIDDEN, HIDDEN]))
    return h


LEAKED: list[mkc.Tensor] = []


def value_of_another_graph(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
    trace(lambda other_step, other: LEAKED.append(other) or other)  # type: ignore[func-returns-value]
    return h + LEAKED[-1]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (nested_loops, TraceError, "a loop over layers inside another"),
        (two_shapes_of_one_name, ParamNameError, r"'w': declared as parameter bf16\[16, 8\]"),
        (prefix_without_index, ParamNameError, r"has no \{index\}"),
        (value_of_another_graph, TraceError, "belongs to another graph"),
        (lambda step, h: h + 1, TraceError, "an operand is 1"),
        (lambda step, h: h if h else h, TraceError, "not known while the graph is built"),
        (lambda step, h: mkc.linear(h, mkc.param("w", [4, 9])), ShapeError, "in = 8"),
        (lambda step, h: mkc.linear(h, mkc.param("w", [4, 0])), ShapeError, "positive integers"),
        (lambda step, h: mkc.linear(h, mkc.param("w", [4, 8], "f8")), ParamNameError, "'f8'"),
    ],
)
def test_python_that_records_no_graph(
    body: Callable[[mkc.Step, mkc.Tensor], mkc.Tensor], error: type[MkcError], message: str
) -> None:
    """Every message starts with the author's file and line."""
    with pytest.raises(error, match=message) as caught:
        trace(body)
    assert re.match(r"\S*test_builder\.py:\d+: ", str(caught.value))


def test_a_call_outside_of_tracing() -> None:
    with pytest.raises(TraceError, match="no graph is being built"):
        mkc.param("w", [4, 4])


def test_a_function_that_returns_something_else() -> None:
    def function(step: mkc.Step) -> mkc.Tensor:
        return step.tokens

    with pytest.raises(TraceError, match=r"returned Tensor.*expected mkc\.Outputs"):
        mkc.trace(function, name="m", batch=1, context=4)  # type: ignore[arg-type]


def test_a_function_with_other_parameters() -> None:
    def function(config: int, step: mkc.Step) -> mkc.Outputs:
        raise AssertionError("not called")

    with pytest.raises(TraceError, match=r"takes 2 arguments; expected function\(step\)"):
        mkc.trace(function, name="m", batch=1, context=4)


def test_tracing_twice_gives_the_same_graph() -> None:
    def body(step: mkc.Step, h: mkc.Tensor) -> mkc.Tensor:
        for layer in mkc.layers(4):
            h = h + mkc.linear(h, layer.param("w", [HIDDEN, HIDDEN]))
        return h

    assert trace(body) == trace(body)


def test_types_print_as_in_the_text_form() -> None:
    assert str(tensor(mkc.F32, 2, mkc.heads(3, 4))) == "f32[2, 12]"
