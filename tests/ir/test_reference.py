"""The reference evaluator: regions, stacked parameters and states, batches, observation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import mkc
from mkc.errors import UnsupportedOpError
from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Graph
from mkc.ir.graph import Repeat
from mkc.ir.ops import CausalConv
from mkc.ir.reference import compile_step
from mkc.ir.reference import evaluate
from mkc.ir.reference import initial_states
from tests.goldens import golden_case
from tests.ir.test_fold import unfolded

WIDTH, VOCAB, PATTERN = 8, 16, "aabaab"


def stack(step: mkc.Step) -> mkc.Outputs:
    """Layers `a` project; layers `b` convolve with a state."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, WIDTH]))
    for layer in mkc.layers(len(PATTERN), prefix="layers.{index}."):
        if PATTERN[layer.index] == "a":
            h = h + mkc.linear(h, layer.param("a.weight", [WIDTH, WIDTH]))
        else:
            state = layer.state("history", "conv", [1, WIDTH])
            h = h + mkc.causal_conv(h, layer.param("b.weight", [WIDTH, 1, 2]), state=state)
    return mkc.next_token(h, mkc.param("lm_head.weight", [VOCAB, WIDTH]))


def stack_graph(batch: int = 1) -> Graph:
    return mkc.trace(stack, name="stack", batch=batch, context=8)


def random_params(graph: Graph) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(5)
    return {
        name: random.standard_normal(param.type.shape).astype(np.float32) * 0.3
        for param in graph.params.values()
        for name in param.tensor_names()
    }


def plain_numpy(
    params: dict[str, NDArray[np.float32]], tokens: list[int]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Logits after the last of `tokens`, and the stream after every layer of the last step."""
    wide = {name: array.astype(np.float64) for name, array in params.items()}
    history = {n: np.zeros(WIDTH) for n in range(len(PATTERN))}
    stream = []
    for token in tokens:
        h = wide["embed.weight"][token]
        stream = []
        for n, kind in enumerate(PATTERN):
            if kind == "a":
                h = h + wide[f"layers.{n}.a.weight"] @ h
            else:
                taps = wide[f"layers.{n}.b.weight"][:, 0]
                total = taps[:, 0] * history[n] + taps[:, 1] * h
                history[n] = h
                h = h + total / (1 + np.exp(-total))
            stream.append(h)
    return wide["lm_head.weight"] @ h, stream


def test_stacks_and_states_of_nested_regions() -> None:
    graph = stack_graph()
    assert any(isinstance(item, Repeat) for item in graph.body.items)
    params = random_params(graph)
    states = initial_states(graph, "float32")
    tokens = [3, 14, 7]
    step = compile_step(graph, params, rounding="float32")
    for position, token in enumerate(tokens):
        result = step([token], [position], states)
        states = result.states
    expected, _ = plain_numpy(params, tokens)
    np.testing.assert_allclose(result.outputs["logits"][0], expected, rtol=1e-4, atol=1e-5)
    assert int(result.outputs["next_token"][0]) == expected.argmax()


def test_observed_values_come_in_execution_order() -> None:
    graph = stack_graph()
    params = random_params(graph)
    (outer,) = (item for item in graph.body.items if isinstance(item, Repeat))
    (inner,) = (item for item in outer.body.items if isinstance(item, Repeat))
    after_a, after_b = inner.carries[0].yielded, outer.carries[0].yielded
    result = evaluate(
        graph,
        tokens=[3],
        positions=[0],
        params=params,
        states=initial_states(graph, "float32"),
        rounding="float32",
        observe=[after_a, after_b],
    )
    _, stream = plain_numpy(params, [3])
    found_a, found_b = result.observed[after_a][:, 0], result.observed[after_b][:, 0]
    np.testing.assert_allclose(found_a, [stream[n] for n in (0, 1, 3, 4)], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found_b, [stream[n] for n in (2, 5)], rtol=1e-4, atol=1e-5)


def test_states_have_instances_and_batch_in_front() -> None:
    graph = stack_graph(batch=3)
    states = initial_states(graph)
    assert {key: one.shape for key, one in states.items()} == {
        "layers.{index}.history": (2, 3, 1, WIDTH)
    }
    assert all(one.dtype == jnp.bfloat16 for one in states.values())
    assert all(one.dtype == jnp.float32 for one in initial_states(graph, "float32").values())


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    """Three sequences of the shipped model, each at its own position, like three runs of one."""
    case = golden_case("qwen38_mini")
    single, batched = case.graph(context=16), case.graph(batch=3, context=16)
    one = compile_step(single, case.weights(), rounding="float32")
    three = compile_step(batched, case.weights(), rounding="float32")
    prompts = [[5, 6, 7, 8, 9], [100, 200], [1]]
    runs = []
    for prompt in prompts:
        states = initial_states(single, "float32")
        for position, token in enumerate(prompt):
            result = one([token], [position], states)
            states = result.states
        runs.append(result)
    # The same, the shorter sequences starting later; the states of the others are put in.
    before = []
    for prompt in prompts:
        states = initial_states(single, "float32")
        for position, token in enumerate(prompt[:-1]):
            states = one([token], [position], states).states
        before.append(states)
    joined = {key: jnp.concatenate([one[key] for one in before], axis=1) for key in before[0]}
    result = three(
        [prompt[-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts], joined
    )
    for row, run in enumerate(runs):
        np.testing.assert_allclose(
            result.outputs["logits"][row], run.outputs["logits"][0], rtol=0, atol=2e-5
        )
        for key, array in run.states.items():
            np.testing.assert_allclose(result.states[key][:, row], array[:, 0], rtol=0, atol=2e-5)


def test_a_folded_graph_means_the_same_as_the_layers_one_by_one() -> None:
    case = golden_case("qwen38_mini")
    folded = case.graph(context=16)
    flat = unfolded(lambda: case.graph(context=16))
    results = [
        evaluate(
            graph,
            tokens=[11],
            positions=[0],
            params=case.weights(),
            states=initial_states(graph, "float32"),
            rounding="float32",
        )
        for graph in (folded, flat)
    ]
    logits = [result.outputs["logits"] for result in results]
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-5)
    assert len(flat.states) > len(folded.states)


def test_a_value_that_does_not_exist_cannot_be_observed() -> None:
    graph = stack_graph()
    with pytest.raises(AssertionError, match="no such values: {'nothing'}"):
        evaluate(
            graph,
            tokens=[0],
            positions=[0],
            params=random_params(graph),
            states=initial_states(graph),
            observe=["nothing"],
        )


def test_an_op_without_a_meaning_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REFERENCE.table, CausalConv)
    graph = stack_graph()
    with pytest.raises(UnsupportedOpError, match=r"test_reference\.py:\d+: op 'causal_conv'"):
        evaluate(
            graph,
            tokens=[0],
            positions=[0],
            params=random_params(graph),
            states=initial_states(graph),
        )
