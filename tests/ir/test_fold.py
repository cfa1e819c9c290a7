"""Folding: a loop over layers becomes repeat regions that execute the same ops in order."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

import mkc
from mkc.errors import ParamNameError
from mkc.ir import builder
from mkc.ir.assemble import Item
from mkc.ir.fold import Folding
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Repeat
from mkc.ir.trace import TracedLoop
from mkc.ir.verify import verify
from tests.ir.symbolic import executions

WIDTH, VOCAB = 4, 8


def linear(layer: mkc.Layer, x: mkc.Tensor, name: str) -> mkc.Tensor:
    return mkc.linear(x, layer.param(f"{name}.weight", [WIDTH, WIDTH]))


def trace_stack(
    count: int, body: Callable[[mkc.Layer, mkc.Tensor], mkc.Tensor], taps: Sequence[int] = ()
) -> Graph:
    """`h = body(layer, h)` for every layer; what layers `taps` gave is added at the end."""

    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, WIDTH]))
        kept = []
        for layer in mkc.layers(count):
            h = body(layer, h)
            if layer.index in taps:
                kept.append(h)
        for one in kept:
            h = h + one
        return mkc.next_token(h, mkc.param("lm_head.weight", [VOCAB, WIDTH]))

    graph = mkc.trace(function, name="stack", batch=1, context=8)
    verify(graph)
    return graph


def trace_pattern(pattern: str, taps: Sequence[int] = ()) -> Graph:
    """One layer per letter; layers of one letter are alike."""
    return trace_stack(
        len(pattern), lambda layer, h: h + linear(layer, h, pattern[layer.index]), taps
    )


def structure(block: Block) -> str:
    """`2{ 3{a} b }`: a letter per projection, regions in braces."""
    parts = []
    for item in block.items:
        if isinstance(item, Repeat):
            parts.append(f"{item.count}{{ {structure(item.body)} }}")
        elif item.op.mnemonic == "linear" and "layers" in item.operands[1]:
            parts.append(item.operands[1].split("#")[0].split(".")[-2])
    return " ".join(parts)


def unfolded(build: Callable[[], Graph]) -> Graph:
    """The graph that `build` traces when nothing is folded."""

    def keep(loop: TracedLoop, **_: object) -> Folding:
        items: list[Item] = [node for segment in loop.segments for node in segment]
        return Folding(items=items, renamed={})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "fold_loop", keep)
        return build()


def assert_same_program(build: Callable[[], Graph]) -> Graph:
    """The folded graph executes exactly what was traced."""
    folded, flat = build(), unfolded(build)
    assert not any(isinstance(item, Repeat) for item in flat.body.items)
    assert executions(folded) == executions(flat)
    return folded


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", "a"),
        ("aa", "2{ a }"),
        ("ab", "a b"),
        ("aaaaaaaa", "8{ a }"),
        ("abababab", "4{ a b }"),
        ("aaabaaabaaab", "3{ 3{ a } b }"),
        ("daaabaaab", "d 2{ 3{ a } b }"),  # the first layer is special
        ("aaabaaabaa", "2{ 3{ a } b } 2{ a }"),  # the pattern is cut short
        ("aaabaaabacabaaabaaab", "2{ 3{ a } b } a c a 2{ b 3{ a } } b"),  # one in the middle
        ("aabbaabb", "2{ 2{ a } 2{ b } }"),
        ("aabaabcaabaabcaabaabc", "3{ 2{ 2{ a } b } c }"),  # three levels
        ("abcabdabcabd", "2{ a b c a b d }"),
        ("aabaaabaabaaab", "2{ 2{ a } b 3{ a } b }"),
    ],
)
def test_pattern(pattern: str, expected: str) -> None:
    graph = assert_same_program(lambda: trace_pattern(pattern))
    assert structure(graph.body) == expected


def test_parameters_are_stacked_in_execution_order() -> None:
    graph = trace_pattern("aaabaaab")
    assert graph.params["model.layers.{index}.a.weight"].indices == (0, 1, 2, 4, 5, 6)
    assert graph.params["model.layers.{index}.b.weight"].indices == (3, 7)


def test_a_peeled_layer_has_its_number_in_the_name() -> None:
    graph = trace_pattern("daa")
    assert graph.params["model.layers.0.d.weight"].indices == ()
    assert graph.params["model.layers.{index}.a.weight"].indices == (1, 2)


def test_keys_are_numbered_where_one_pattern_is_used_at_several_places() -> None:
    """Both kinds of layer have a norm of the same name."""

    def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
        x = mkc.rms_norm(h, layer.param("norm.weight", [WIDTH]), eps=1e-6)
        return h + linear(layer, x, "b" if layer.index % 2 else "a")

    graph = assert_same_program(lambda: trace_stack(6, body))
    norms = {key: one.indices for key, one in graph.params.items() if "norm" in key}
    assert norms == {
        "model.layers.{index}.norm.weight#0": (0, 2, 4),
        "model.layers.{index}.norm.weight#1": (1, 3, 5),
    }


def test_layers_that_share_a_parameter_stay_apart() -> None:
    """A region has one instance per execution, which a shared parameter has not."""
    graph = assert_same_program(
        lambda: trace_stack(
            3, lambda layer, h: h + mkc.linear(h, mkc.param("shared.weight", [WIDTH, WIDTH]))
        )
    )
    assert graph.params["shared.weight"].indices == ()
    assert [node.op.mnemonic for node in graph.body.nodes()].count("linear") == 4


def test_pairs_of_layers_that_share_a_parameter_fold_as_pairs() -> None:
    def build() -> Graph:
        earlier: list[mkc.Layer] = []

        def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
            earlier.append(layer)
            return h + linear(earlier[layer.index // 2 * 2], h, "a")

        return trace_stack(6, body)

    graph = assert_same_program(build)
    assert structure(graph.body) == "3{ a a }"
    assert graph.params["model.layers.{index}.a.weight"].indices == (0, 2, 4)


def test_a_value_read_after_the_loop_keeps_its_layer_visible() -> None:
    """A tap in the middle of a run ends the region there; the tapped value is its result."""
    graph = assert_same_program(lambda: trace_pattern("aaaaaaaa", taps=[3]))
    assert structure(graph.body) == "4{ a } 4{ a }"


def test_layers_that_read_two_layers_back_fold_in_pairs() -> None:
    """What flows over two layers is a carry of the pair."""

    def build() -> Graph:
        earlier: list[mkc.Tensor] = []

        def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
            earlier.append(linear(layer, h, "a"))
            return h + earlier[-3] if layer.index >= 2 else h + earlier[-1]

        return trace_stack(10, body)

    graph = assert_same_program(build)
    assert structure(graph.body) == "a a 4{ a a }"
    (region,) = (item for item in graph.body.items if isinstance(item, Repeat))
    assert len(region.carries) == 3


def test_a_value_of_one_layer_that_all_later_layers_read() -> None:
    """Layer 0 makes it; layers 1 to 5 read it from outside their region."""

    def build() -> Graph:
        made: list[mkc.Tensor] = []

        def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
            made.append(h)
            return linear(layer, h, "a") + made[min(1, layer.index)]

        return trace_stack(6, body)

    graph = assert_same_program(build)
    assert structure(graph.body) == "a 5{ a }"


def test_a_value_that_the_last_layer_of_each_group_hands_on() -> None:
    """Three layers read what the layer before them made: a carry, read in an inner region."""

    def build() -> Graph:
        shared: list[mkc.Tensor] = []

        def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
            if not shared:
                shared.append(h)
            if layer.index % 4 == 3:
                shared.append(linear(layer, h, "b"))
                return h + shared[-1]
            return linear(layer, h, "a") + shared[-1]

        return trace_stack(16, body)

    graph = assert_same_program(build)
    assert structure(graph.body) == "4{ 3{ a } b }"


def test_groups_that_pass_on_different_values_stay_apart() -> None:
    """Layers `b` are alike, but read one result of the layer before them or the other."""

    def build() -> Graph:
        made: list[mkc.Tensor] = []

        def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
            if layer.index % 2 == 0:
                made[:] = [linear(layer, h, "a"), mkc.scale(h, 2.0)]
                return h
            return linear(layer, h, "b") + made[layer.index // 2 % 2]

        return trace_stack(8, body)

    graph = assert_same_program(build)
    assert structure(graph.body) == "2{ a b a b }"


def test_attributes_tell_layers_apart() -> None:
    def scaled(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
        return mkc.scale(linear(layer, h, "a"), 2.0 if layer.index < 3 else 3.0)

    graph = assert_same_program(lambda: trace_stack(6, scaled))
    assert structure(graph.body) == "3{ a } 3{ a }"


def test_layers_without_ops_disappear() -> None:
    graph = assert_same_program(
        lambda: trace_stack(6, lambda layer, h: h if layer.index % 2 else h + linear(layer, h, "a"))
    )
    assert structure(graph.body) == "3{ a }"
    assert graph.params["model.layers.{index}.a.weight"].indices == (0, 2, 4)


def test_states_are_stacked_like_parameters() -> None:
    def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
        if layer.index % 3 == 2:
            return h + linear(layer, h, "b")
        state = layer.state("history", "conv", [1, WIDTH])
        return h + mkc.causal_conv(h, layer.param("conv", [WIDTH, 1, 2]), state=state)

    graph = assert_same_program(lambda: trace_stack(9, body))
    (state,) = graph.states.values()
    assert state.indices == (0, 1, 3, 4, 6, 7)
    assert state.kind == "conv"


def test_a_state_of_another_layer_is_refused() -> None:
    states: list[mkc.StateRef] = []

    def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
        states.append(layer.state("history", "conv", [1, WIDTH]))
        return mkc.causal_conv(h, layer.param("conv", [WIDTH, 1, 2]), state=states[0])

    with pytest.raises(
        ParamNameError, match=r"test_fold.py:\d+: .model\.layers\.0\.history.: a second op"
    ):
        trace_stack(3, body)


def test_two_loops_fold_on_their_own() -> None:
    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, WIDTH]))
        for layer in mkc.layers(3, prefix="encoder.layers.{index}."):
            h = h + linear(layer, h, "a")
        h = mkc.scale(h, 0.5)
        for layer in mkc.layers(2, prefix="decoder.blocks.{index}."):
            h = h + linear(layer, h, "a")
        return mkc.next_token(h, mkc.param("lm_head.weight", [VOCAB, WIDTH]))

    graph = assert_same_program(lambda: mkc.trace(function, name="two", batch=1, context=8))
    regions = [item for item in graph.body.items if isinstance(item, Repeat)]
    assert [(one.name, one.count) for one in regions] == [("layers", 3), ("blocks", 2)]


def test_a_region_is_placed_at_its_first_layer() -> None:
    graph = trace_pattern("aaaa")
    (region,) = (item for item in graph.body.items if isinstance(item, Repeat))
    assert region.location is not None
    assert region.location.file.endswith("test_fold.py")
    assert region.location == next(region.body.nodes()).location


def test_the_graph_does_not_grow_with_depth() -> None:
    shallow, deep = trace_pattern("aaab" * 4), trace_pattern("aaab" * 64)
    assert len(list(shallow.body.nodes())) == len(list(deep.body.nodes()))
    assert structure(deep.body) == "64{ 3{ a } b }"


@dataclass(frozen=True, kw_only=True)
class RandomLayer:
    """A layer that projects the stream and adds the result of the op `back` results ago."""

    kind: str
    back: int
    resets: bool


def trace_random(stack: Sequence[RandomLayer], taps: Sequence[int]) -> Graph:
    made: list[mkc.Tensor] = []

    def body(layer: mkc.Layer, h: mkc.Tensor) -> mkc.Tensor:
        one = stack[layer.index]
        made.append(h)
        made.append(linear(layer, h, one.kind))
        made.append(made[-1] + made[-min(one.back, len(made))])
        return made[-2] if one.resets else made[-1]

    return trace_stack(len(stack), body, taps)


LAYERS = strategies.builds(
    RandomLayer,
    kind=strategies.sampled_from("ab"),
    back=strategies.integers(1, 10),
    resets=strategies.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    unit=strategies.lists(LAYERS, min_size=1, max_size=4),
    repeats=strategies.integers(1, 5),
    changes=strategies.lists(strategies.tuples(strategies.integers(0, 19), LAYERS), max_size=2),
    taps=strategies.lists(strategies.integers(0, 19), max_size=2),
)
def test_any_stack_executes_what_was_traced(
    unit: list[RandomLayer],
    repeats: int,
    changes: list[tuple[int, RandomLayer]],
    taps: list[int],
) -> None:
    layers = unit * repeats
    for place, layer in changes:
        layers[place % len(layers)] = layer
    assert_same_program(lambda: trace_random(layers, taps))
