"""The shipped model, evaluated by the reference evaluator, against values of a public library.

Both forms of experts: plain, and packed in MXFP4. In f32 every number must agree within the
measured tolerance; with the roundings of the graph, within that of bf16. There a token whose
routing is nearly tied may choose another expert, so the median of positions counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import SCALE_BIAS
from mkc.ir.mxfp4 import to_fp8
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.reference import Rounding
from tests.generate_weights import digest
from tests.kimi_goldens import KIMI_CASES
from tests.kimi_goldens import KimiPlayer
from tests.kimi_goldens import KimiRun
from tests.kimi_goldens import kimi_case
from tests.kimi_goldens import kimi_player
from tests.kimi_weights import decoded

PROMPT, DECODED, BLOCK_LAYERS = 48, 64, 4
CACHED = ("latent", "shared_key")
# As in `tests.ir.test_reference_goldens`, for states in front of any routing.
BF16_STATE_RELATIVE_RMS = 0.03
ROUNDINGS: tuple[Rounding, ...] = ("float32", "reference")

on_cases = pytest.mark.parametrize("name", KIMI_CASES)


def prompt_of(player: KimiPlayer) -> KimiRun:
    return player.run(player.case.expected["prompt"].tolist(), 0, player.empty())


@cache
def prompt_run(name: str, rounding: Rounding) -> KimiRun:
    return prompt_of(kimi_player(name, rounding))


@cache
def greedy_run(name: str, rounding: Rounding) -> tuple[list[int], NDArray[np.float32]]:
    """64 tokens, the first by the prompt, and the logits that chose them."""
    player, run = kimi_player(name, rounding), prompt_run(name, rounding)
    tokens, logits = [], []
    for number in range(DECODED):
        logits.append(run.logits[-1])
        tokens.append(int(run.logits[-1].argmax()))
        if number + 1 < DECODED:
            run = player.run(tokens[-1:], PROMPT + number, run.states)
    return tokens, np.stack(logits)


def worst(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def rms(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.sqrt(np.mean((found - expected) ** 2)))


def median_rms(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Over positions, the median of the difference within one."""
    return float(np.median(np.sqrt(np.mean((found - expected) ** 2, axis=-1))))


def state_pairs(
    player: KimiPlayer, states: Mapping[str, Any], prefix: str, rows: slice
) -> list[tuple[str, NDArray[Any], NDArray[Any]]]:
    """(name, found, expected) for every recorded state; of caches the rows that are recorded."""
    pairs = []
    for name, expected in sorted(player.case.expected.items()):
        if not name.startswith(f"{prefix}.state."):
            continue
        layer, kind = name.removeprefix(f"{prefix}.state.layer").split(".")
        found = player.state(states, int(layer), kind)
        if kind in CACHED:
            assert not found[rows.stop :].any(), f"{name}: rows were written ahead"
            found = found[rows]
        pairs.append((name, found, expected))
    return pairs


@on_cases
def test_weights_are_those_of_the_goldens(name: str) -> None:
    case = kimi_case(name)
    assert digest(case.weights()) == case.meta["weights_sha256"]


# In f32.


@on_cases
def test_prompt_agrees_in_f32(name: str) -> None:
    case, found = kimi_case(name), prompt_run(name, "float32")
    assert worst(found.logits, case.expected["prefill.logits"]) < case.tolerances["f32_logits_abs"]
    measured = case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
    assert worst(found.residual[:, -4:], case.expected["prefill.residual"]) < 10 * measured


@on_cases
def test_stored_blocks_are_the_stream_in_front_of_every_fourth_layer(name: str) -> None:
    case, found = kimi_case(name), prompt_run(name, "float32")
    measured = case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
    expected = case.expected["prefill.residual"][:-1:BLOCK_LAYERS]
    assert worst(found.blocks[-4:].transpose(1, 0, 2), expected) < 10 * measured


@on_cases
def test_states_after_the_prompt_agree_in_f32(name: str) -> None:
    player, found = kimi_player(name, "float32"), prompt_run(name, "float32")
    pairs = state_pairs(player, found.states, "prefill", slice(0, PROMPT))
    kinds = {pair[0].rsplit(".", 1)[1] for pair in pairs}
    assert kinds == {"conv", "recurrent", *CACHED}
    for label, state, expected in pairs:
        assert worst(state, expected) < player.case.tolerances["f32_state_abs"], label


@on_cases
def test_greedy_tokens_agree_in_f32(name: str) -> None:
    case = kimi_case(name)
    tokens, logits = greedy_run(name, "float32")
    assert tokens == case.expected["decode.tokens"].tolist()
    assert worst(logits, case.expected["decode.logits"]) < case.tolerances["f32_logits_abs"]


@on_cases
@pytest.mark.parametrize("block", ["verify0", "verify4", "verify7"])
def test_a_block_after_the_prompt_agrees_in_f32(name: str, block: str) -> None:
    """Eight given tokens at once: logits and residuals of all, states after the accepted ones."""
    player = kimi_player(name, "float32")
    expected, tolerances = player.case.expected, player.case.tolerances
    tokens, before = expected[f"{block}.block"].tolist(), prompt_run(name, "float32").states
    found = player.run(tokens, PROMPT, before)
    assert worst(found.logits, expected[f"{block}.logits"]) < tolerances["f32_logits_abs"]
    assert found.logits.argmax(-1).tolist() == expected[f"{block}.argmax"].tolist()
    if f"{block}.residual" in expected:
        measured = player.case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
        assert worst(found.residual, expected[f"{block}.residual"]) < 10 * measured
    rows = int(expected[f"{block}.accepted"][0]) + 1
    kept = player.run(tokens, PROMPT, before, count=rows)
    pairs = state_pairs(player, kept.states, block, slice(PROMPT, PROMPT + rows))
    assert pairs
    for label, state, wanted in pairs:
        assert worst(state, wanted) < tolerances["f32_state_abs"], label


# With the roundings of the graph.


@on_cases
def test_prompt_agrees_with_the_graphs_roundings(name: str) -> None:
    case, found = kimi_case(name), prompt_run(name, "reference")
    expected = case.expected["prefill.logits"]
    assert worst(found.logits, expected) < case.tolerances["bf16_logits_abs"]
    assert rms(found.logits, expected) < case.tolerances["bf16_logits_rms"]
    median = case.tolerances["bf16_logits_rms_of_median_position"]
    assert median_rms(found.logits, expected) < median
    bounds = case.meta["checks"]["bf16_evaluation"]["residual_per_layer_max_abs"]
    for layer, bound in enumerate(bounds):
        # Layer 0 is the embedding, which is exact.
        expected = case.expected["prefill.residual"][layer]
        assert worst(found.residual[layer, -4:], expected) <= 2 * bound, layer


@on_cases
def test_states_agree_with_the_graphs_roundings(name: str) -> None:
    """Behind experts, a token that chose another one shows: then relative to their size states
    have no more error than logits, whose tolerance is twice the library's own difference."""
    player, found = kimi_player(name, "reference"), prompt_run(name, "reference")
    meta, tolerances = player.case.meta, player.case.tolerances
    routed = tolerances["bf16_logits_rms"] / meta["decode"]["logits_std"]
    assert routed < 0.07
    for label, state, expected in state_pairs(player, found.states, "prefill", slice(0, PROMPT)):
        bound = BF16_STATE_RELATIVE_RMS if "layer0" in label else routed
        assert rms(state, expected) < bound * expected.std(), label


@on_cases
def test_greedy_tokens_agree_with_the_graphs_roundings(name: str) -> None:
    case = kimi_case(name)
    tokens, logits = greedy_run(name, "reference")
    assert tokens == case.expected["decode.tokens"].tolist()
    assert rms(logits, case.expected["decode.logits"]) < case.tolerances["bf16_logits_rms"]


def test_rounding_is_visible() -> None:
    exact, rounded = (prompt_run("kimi_k3_mini", one) for one in ROUNDINGS)
    tolerance = kimi_case("kimi_k3_mini").tolerances["f32_logits_abs"]
    assert worst(exact.logits, rounded.logits) > 100 * tolerance


# Other forms of the same numbers.


def test_packed_experts_are_their_decoded_values() -> None:
    """The same bits as a checkpoint that stores them in bf16."""
    name = "kimi_k3_mini_mxfp4"
    plain = KimiPlayer(
        name, "reference", weights=decoded(kimi_case(name).weights()), quantization_config=None
    )
    assert (prompt_of(plain).logits == prompt_run(name, "reference").logits).all()


def test_packed_experts_in_fp8_keep_every_bit() -> None:
    """Gate and up of all experts, each matrix one block of rows."""
    tensors = kimi_case("kimi_k3_mini_mxfp4").weights()
    plain = decoded(tensors)
    names = [name for name in tensors if name.endswith(("w1.weight_packed", "w3.weight_packed"))]
    assert len(names) == 8 * 32 * 2
    for name in names:
        master = name.removesuffix("_packed")
        rows = tensors[name].shape[0]
        found = to_fp8(tensors[name], tensors[master + "_scale"], rows)
        factors = np.ldexp(np.float32(1), found.scales.astype(int) - SCALE_BIAS)
        values = found.values.astype(np.float32) * np.repeat(factors, GROUP, axis=1)
        assert found.exact.all()
        assert (values == plain[master].astype(np.float32)).all(), master


def test_padding_of_the_decay_rates_is_not_read() -> None:
    """A_log is stored longer than there are heads."""
    name = "kimi_k3_mini"
    heads = kimi_case(name).config["text_config"]["num_attention_heads"]
    weights = dict(kimi_case(name).weights())
    for key in [one for one in weights if one.endswith("A_log")]:
        assert len(weights[key]) > heads and not weights[key][heads:].any()
        weights[key] = np.where(np.arange(len(weights[key])) < heads, weights[key], np.nan)
    found = prompt_of(KimiPlayer(name, "float32", weights=weights))
    assert (found.logits == prompt_run(name, "float32").logits).all()


def test_an_expanded_cache_gives_the_same_numbers() -> None:
    """Over the prompt and one more token; the caches are those of every head."""
    name = "kimi_k3_mini"
    player = KimiPlayer(name, "float32", form=CacheForm.EXPANDED)
    case, prompt = player.case, prompt_of(player)
    tolerance = case.tolerances["f32_logits_abs"]
    assert worst(prompt.logits, case.expected["prefill.logits"]) < tolerance
    following = player.run(case.expected["decode.tokens"][:1].tolist(), PROMPT, prompt.states)
    assert worst(following.logits[0], case.expected["decode.logits"][1]) < tolerance
    shapes = {one.type.shape[1:] for one in player.graph(1).states.values() if "kv" in one.pattern}
    assert shapes == {(8, 48), (8, 32)}


# What the tests above see.


@pytest.mark.parametrize(
    "changes",
    [
        {"low_rank_norm_eps": 1e-5},
        {"rms_norm_eps": 1e-6},
        {"attn_res_block_size": 3},
        {"num_experts_per_token": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_goldens_see_a_wrong_config(changes: dict[str, Any]) -> None:
    player = KimiPlayer("kimi_k3_mini", "float32", **changes)
    tolerance = player.case.tolerances["f32_logits_abs"]
    assert worst(prompt_of(player).logits, player.case.expected["prefill.logits"]) > 10 * tolerance


def test_the_goldens_see_another_scale_byte() -> None:
    """One group of one expert, twice as large."""
    name = "kimi_k3_mini_mxfp4"
    weights = dict(kimi_case(name).weights())
    key = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
    weights[key] = weights[key] + (np.arange(weights[key].size).reshape(weights[key].shape) == 0)
    player = KimiPlayer(name, "float32", weights=weights)
    tolerance = player.case.tolerances["f32_logits_abs"]
    assert worst(prompt_of(player).logits, player.case.expected["prefill.logits"]) > tolerance
