"""The shipped model, evaluated by the reference evaluator, against values of a public library.

Tokens are fed one by one; the library computed the prompt at once. In f32 every number must agree
within the measured tolerance; with the roundings of the graph, within that of bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.reference import Rounding
from mkc.ir.reference import StepFunction
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from tests.generate_weights import digest
from tests.goldens import CASES
from tests.goldens import Golden
from tests.goldens import golden_case
from tests.goldens import layer_state
from tests.goldens import residual_places

PROMPT, DECODED = 48, 64
STATE_NAMES = {
    "conv": "linear_attn.conv",
    "recurrent": "linear_attn.recurrent",
    "key": "self_attn.kv.key",
    "value": "self_attn.kv.value",
}
# bf16 keeps 8 significant bits (0.4 %); a state is a handful of roundings behind its layer's input,
# which is itself up to eight layers deep.
BF16_STATE_RELATIVE_RMS = 0.03


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run over some tokens.

    Attributes:
      tokens: the token that each step chose.
      logits: f32 [steps, vocab].
      residual: f32 [steps, layers + 1, hidden].
      states: the states after every step.
    """

    tokens: list[int]
    logits: NDArray[np.float32]
    residual: NDArray[np.float32]
    states: list[Mapping[str, Any]]


@cache
def step_of(name: str, rounding: Rounding) -> StepFunction:
    case = golden_case(name)
    graph = case.graph()
    observe = sorted({place.name for place in residual_places(graph)})
    return compile_step(graph, case.weights(), rounding=rounding, observe=observe)


def run(
    case: Golden, rounding: Rounding, tokens: Sequence[int], *, after: Run | None, greedy: int = 0
) -> Run:
    """Feeds `tokens`, then `greedy` more that the model chooses itself."""
    step = step_of(case.name, rounding)
    graph = case.graph()
    places = residual_places(graph)
    states = after.states[-1] if after else initial_states(graph, rounding)
    start = len(after.tokens) if after else 0
    found = Run(tokens=[], logits=np.empty(0), residual=np.empty(0), states=[])
    logits, residual = [], []
    for number in range(len(tokens) + greedy):
        token = tokens[number] if number < len(tokens) else found.tokens[-1]
        result = step([token], [start + number], states)
        states = result.states
        found.tokens.append(int(result.outputs["next_token"][0]))
        found.states.append(states)
        logits.append(np.asarray(result.outputs["logits"][0], np.float32))
        residual.append(
            [np.asarray(result.observed[one.name][one.execution, 0], np.float32) for one in places]
        )
    return Run(
        tokens=found.tokens,
        logits=np.stack(logits),
        residual=np.asarray(residual),
        states=found.states,
    )


@cache
def prompt_run(name: str, rounding: Rounding) -> Run:
    case = golden_case(name)
    return run(case, rounding, case.expected["prompt"].tolist(), after=None)


@cache
def greedy_run(name: str, rounding: Rounding) -> Run:
    """The 64 chosen tokens: the first by the prompt's last step."""
    case = golden_case(name)
    prompt = prompt_run(name, rounding)
    return run(case, rounding, prompt.tokens[-1:], after=prompt, greedy=DECODED - 2)


def worst(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def rms(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.sqrt(np.mean((found - expected) ** 2)))


def state_pairs(
    case: Golden, states: Mapping[str, Any], prefix: str, first: int, rows: int
) -> list[tuple[str, NDArray[Any], NDArray[Any]]]:
    """(name, found, expected) for every recorded state; caches only from row `first` on."""
    graph = case.graph()
    pairs = []
    for name, expected in sorted(case.expected.items()):
        if not name.startswith(f"{prefix}.state."):
            continue
        layer, kind = name.removeprefix(f"{prefix}.state.layer").split(".")
        found = layer_state(graph, states, int(layer), STATE_NAMES[kind])[0]
        if kind in ("key", "value"):
            assert not found[first + rows :].any(), f"{name}: rows were written ahead"
            found = found[first : first + rows]
        pairs.append((name, found, expected))
    return pairs


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_goldens(name: str) -> None:
    case = golden_case(name)
    assert digest(case.weights()) == case.meta["weights_sha256"]


@pytest.mark.parametrize("name", CASES)
def test_prompt_agrees_in_f32(name: str) -> None:
    case, found = golden_case(name), prompt_run(name, "float32")
    assert worst(found.logits, case.expected["prefill.logits"]) < case.tolerances["f32_logits_abs"]
    residual = found.residual[-4:].transpose(1, 0, 2)
    measured = case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
    assert worst(residual, case.expected["prefill.residual"]) < 10 * measured


@pytest.mark.parametrize("name", CASES)
def test_states_after_the_prompt_agree_in_f32(name: str) -> None:
    case, found = golden_case(name), prompt_run(name, "float32")
    pairs = state_pairs(case, found.states[-1], "prefill", 0, PROMPT)
    kinds = {pair[0].rsplit(".", 1)[1] for pair in pairs}
    assert kinds == set(STATE_NAMES)
    for label, state, expected in pairs:
        assert worst(state, expected) < case.tolerances["f32_state_abs"], label


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_agree_in_f32(name: str) -> None:
    case = golden_case(name)
    prompt, found = prompt_run(name, "float32"), greedy_run(name, "float32")
    assert [prompt.tokens[-1], *found.tokens] == case.expected["decode.tokens"].tolist()
    logits = np.concatenate([prompt.logits[-1:], found.logits])
    assert worst(logits, case.expected["decode.logits"]) < case.tolerances["f32_logits_abs"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", ["verify0", "verify4", "verify7"])
def test_a_block_after_the_prompt_agrees_in_f32(name: str, block: str) -> None:
    """Eight given tokens: logits of all, residuals and states after the accepted ones."""
    case = golden_case(name)
    expected = case.expected
    tokens = expected[f"{block}.block"].tolist()
    found = run(case, "float32", tokens, after=prompt_run(name, "float32"))
    assert worst(found.logits, expected[f"{block}.logits"]) < case.tolerances["f32_logits_abs"]
    assert found.tokens == expected[f"{block}.argmax"].tolist()
    if f"{block}.residual" in expected:
        measured = case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
        residual = found.residual.transpose(1, 0, 2)
        assert worst(residual, expected[f"{block}.residual"]) < 10 * measured
    rows = int(expected[f"{block}.accepted"][0]) + 1
    pairs = state_pairs(case, found.states[rows - 1], block, PROMPT, rows)
    for label, state, wanted in pairs:
        assert worst(state, wanted) < case.tolerances["f32_state_abs"], label


@pytest.mark.parametrize("name", CASES)
def test_prompt_agrees_with_the_graphs_roundings(name: str) -> None:
    case, found = golden_case(name), prompt_run(name, "reference")
    expected = case.expected["prefill.logits"]
    assert worst(found.logits, expected) < case.tolerances["bf16_logits_abs"]
    assert rms(found.logits, expected) < case.tolerances["bf16_logits_rms"]
    bounds = case.meta["checks"]["bf16_evaluation"]["residual_per_layer_max_abs"]
    residual = found.residual[-4:].transpose(1, 0, 2)
    for layer, bound in enumerate(bounds):
        # Layer 0 is the embedding, which is exact.
        difference = worst(residual[layer], case.expected["prefill.residual"][layer])
        assert difference <= 2 * bound, layer


@pytest.mark.parametrize("name", CASES)
def test_states_agree_with_the_graphs_roundings(name: str) -> None:
    case, found = golden_case(name), prompt_run(name, "reference")
    for label, state, expected in state_pairs(case, found.states[-1], "prefill", 0, PROMPT):
        assert rms(state, expected) < BF16_STATE_RELATIVE_RMS * expected.std(), label


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_agree_with_the_graphs_roundings(name: str) -> None:
    case = golden_case(name)
    prompt, found = prompt_run(name, "reference"), greedy_run(name, "reference")
    assert [prompt.tokens[-1], *found.tokens] == case.expected["decode.tokens"].tolist()
    logits = np.concatenate([prompt.logits[-1:], found.logits])
    assert worst(logits, case.expected["decode.logits"]) < case.tolerances["bf16_logits_abs"]
    assert rms(logits, case.expected["decode.logits"]) < case.tolerances["bf16_logits_rms"]


def test_rounding_is_visible() -> None:
    """The two policies really differ: bf16 is far outside the f32 tolerance."""
    case = golden_case("qwen38_lane")
    exact, rounded = prompt_run(case.name, "float32"), prompt_run(case.name, "reference")
    assert worst(exact.logits, rounded.logits) > 100 * case.tolerances["f32_logits_abs"]
