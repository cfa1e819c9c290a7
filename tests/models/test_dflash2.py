"""The shipped drafter: its config, its size, and its numbers against the published modules.

The golden values come from the features that the target's taps had there, so every difference is
the drafter's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mkc
import models.dflash2
from mkc.ir.builder import Trace
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.graph import Graph
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.reference import Evaluation
from mkc.ir.reference import Rounding
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.types import DType
from mkc.ir.verify import verify
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import block_round
from models.dflash2 import DRAFTER
from models.dflash2 import Config
from models.qwen38 import MODEL
from tests.draft_goldens import TARGET_CASE
from tests.draft_goldens import draft_case
from tests.draft_goldens import draft_weights
from tests.draft_goldens import golden_round
from tests.generate_weights import digest
from tests.goldens import golden_case

FOLDER = Path(models.dflash2.__file__).parent
SHIPPED: dict[str, Any] = loads((FOLDER / DRAFTER.default_config).read_text())
TARGET: dict[str, Any] = loads((FOLDER / MODEL.default_config).read_text())
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
CONTEXT = 64
ROUNDS = ("round1", "round2")


def changed(**keys: Any) -> dict[str, Any]:
    """The shipped config with keys replaced, `None` for none; `draft_` ones in dflash_config."""
    config = deepcopy(SHIPPED)
    for key, value in keys.items():
        part = config["dflash_config"] if key.startswith("draft_") else config
        part.pop(key.removeprefix("draft_"), None)
        if value is not None:
            part[key.removeprefix("draft_")] = value
    return config


# The released size.


def test_the_shipped_config_has_the_published_size() -> None:
    """Counts of the released checkpoint, which has no embedding and no head of its own."""
    graph = block_round(MODEL, TARGET, DRAFTER, SHIPPED, batch=1, context=4096).graph
    verify(graph)
    own = [one for key, one in graph.params.items() if key.startswith(DRAFT_NAMESPACE)]
    names = [name for one in own for name in one.tensor_names()]
    assert len(names) == len(set(names)) == 81
    assert sum(one.type.elements * one.instances for one in own) == 1_924_404_480


def test_caches_of_one_position() -> None:
    graph = block_round(MODEL, TARGET, DRAFTER, SHIPPED, batch=1, context=1000).prefill
    own = [one for key, one in graph.states.items() if key.startswith(DRAFT_NAMESPACE)]
    assert sum(one.type.bytes * one.instances for one in own) == 1000 * 20_480


# Numbers.


def trace(rows: int, fill: bool, seen: int, **changes: Any) -> Graph:
    """The drafter alone: remembers `seen` rows, and fills a block of `rows` if wanted."""
    config = Config.from_hf(draft_case().meta["config"] | changes)
    record = Trace(name="drafter", rows=rows, batch=1, context=CONTEXT)
    features = record.new_input("features", DType.BF16, seen, 3 * config.hidden)
    where = record.new_input("seen", DType.I32, seen)
    context = mkc.ContextStep(
        rows=seen, batch=1, context=CONTEXT, features=features, positions=where
    )
    step = {
        "anchor": record.new_input("anchor", DType.I32, 1),
        "sampling": (
            record.new_input("temperature", DType.F32, 1),
            record.new_input("seed", DType.I32, 1, 2),
        ),
    }
    with recording(record):
        if not fill:
            DRAFTER.remember(config, context)
            return build(record, {"features": features})
        drafts = DRAFTER.propose(
            config,
            mkc.DraftStep(
                rows=rows,
                batch=1,
                remembered=context,
                positions=record.inputs["positions"],
                table=mkc.param(EMBEDDING, [config.vocab, config.hidden]),
                head=mkc.param(HEAD, [config.vocab, config.hidden]),
                **step,
            ),
        )
    results = {"tokens": drafts.tokens, "ids": drafts.candidates, "proposal": drafts.proposal}
    return build(record, results)


def residual_names(graph: Graph) -> list[str]:
    """The value that a layer ends with."""
    return [
        one.results[0].name
        for one in graph.body.nodes()
        if isinstance(one.op, Binary) and one.op.function is BinaryKind.ADD
    ][-1:]


def weights() -> Mapping[str, Any]:
    target = golden_case(TARGET_CASE).weights()
    return {**draft_weights(), EMBEDDING: target[EMBEDDING], HEAD: target[HEAD]}


def inputs(rows: slice, padding: int, anchor: int = 0) -> dict[str, Any]:
    """Golden features of some positions, and padding rows behind them."""
    taps = draft_case().expected["taps"][rows]
    positions = np.arange(rows.start, rows.stop)
    return {
        "features": np.pad(taps, ((0, padding), (0, 0)), constant_values=np.nan),
        "seen": np.pad(positions, (0, padding), constant_values=-1).astype(np.int32),
        "anchor": np.array([anchor], np.int32),
        "temperature": np.zeros(1, np.float32),
        "seed": np.zeros((1, 2), np.int32),
    }


OBSERVED = ("hidden_norm", "embed_tokens", "norm", "lm_head")


@cache
def remembered(rounding: Rounding) -> Mapping[str, Any]:
    """States behind the first 40 positions."""
    graph = trace(40, False, 40)
    step = compile_step(graph, weights(), rounding=rounding)
    block = np.arange(40)
    return step(block, block, initial_states(graph, rounding), inputs(slice(0, 40), 0)).states


@cache
def rounds(rounding: Rounding, **changes: Any) -> dict[str, Evaluation]:
    """Both golden rounds, the second one behind five more rows; 40 rows are remembered before."""
    expected = draft_case().expected
    states = remembered(rounding)
    graph = trace(8, True, 8, **changes)
    verify(graph)
    fill = compile_step(
        graph, weights(), rounding=rounding, observe=[*OBSERVED, *residual_names(graph)]
    )
    found = {}
    for name, rows, padding in zip(ROUNDS, (slice(40, 48), slice(48, 53)), (0, 3), strict=True):
        given = inputs(rows, padding, int(expected[f"{name}.anchor"][0]))
        given["features"] = np.nan_to_num(given["features"])
        positions = rows.stop + np.arange(8)
        found[name] = fill(np.zeros(8, np.int32), positions, states, given)
        states = found[name].states
    return found


def values(found: Evaluation, name: str) -> NDArray[Any]:
    return np.asarray(found.observed[name], np.float32)


def worst(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def residual(found: Evaluation) -> NDArray[Any]:
    """Embedding and what each layer leaves behind, [layers + 1, rows, hidden]."""
    (name,) = residual_names(trace(8, True, 8))
    return np.concatenate([values(found, "embed_tokens"), values(found, name)])


def test_the_weights_are_those_of_the_goldens() -> None:
    assert digest(draft_weights()) == draft_case().meta["weights_sha256"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("rounding", ["float32", "reference"])
def test_numbers_agree_with_the_published_modules(name: str, rounding: Rounding) -> None:
    """In f32 to ten times the error of f32, with roundings to twice that of bf16."""
    case, found = draft_case(), rounds(rounding)[name]
    kind = "f32" if rounding == "float32" else "bf16"
    hidden = case.tolerances[f"{kind}_hidden_abs"]
    last = case.expected[f"{name}.context"].shape[0]
    kept = 8 if name == "round1" else 5
    context = values(found, "hidden_norm")[0, :kept]
    assert worst(context, case.expected[f"{name}.context"][last - kept :]) < hidden
    scale = np.abs(case.expected[f"{name}.residual"]).max()
    assert worst(residual(found), case.expected[f"{name}.residual"]) < hidden * scale
    assert worst(values(found, "norm")[0], case.expected[f"{name}.hidden"]) < hidden
    logits = values(found, "lm_head")[0, 1:]
    assert worst(logits, case.expected[f"{name}.logits"]) < case.tolerances[f"{kind}_logits_abs"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("layer", [0, 2])
def test_caches_hold_the_context_and_not_the_block(name: str, layer: int) -> None:
    case, found = draft_case(), rounds("float32")[name]
    length = case.expected[f"{name}.context"].shape[0]
    for part in ("key", "value"):
        (key,) = (one for one in found.states if one.endswith(f"kv.{part}"))
        cache_rows = np.asarray(found.states[key])[layer, 0]
        expected = case.expected[f"{name}.state.layer{layer}.{part}"][:length]
        assert worst(cache_rows[:length], expected) < case.tolerances["f32_hidden_abs"]
        assert not cache_rows[length:].any()


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("rounding", ["float32", "reference"])
def test_the_walk_is_the_published_one(name: str, rounding: Rounding) -> None:
    expected, found = draft_case().expected, rounds(rounding)[name].outputs
    walk = np.asarray(found["tokens"])
    assert walk[0] == expected[f"{name}.anchor"][0]
    assert walk[1:].tolist() == expected[f"{name}.tokens"].tolist()
    ids = np.asarray(found["ids"])
    if rounding == "float32":
        assert (np.sort(ids[1:]) == expected[f"{name}.candidates"]).all()
    chosen = np.take_along_axis(ids, np.asarray(found["proposal"]).argmax(-1)[:, None], 1)[1:, 0]
    assert chosen.tolist() == walk[1:].tolist()


def test_the_selector_changes_the_walk() -> None:
    """Else a walk without it would pass the test above."""
    logits = draft_case().expected["round1.logits"]
    assert (logits.argmax(-1) != draft_case().expected["round1.tokens"]).sum() >= 3


@pytest.mark.parametrize("changes", [{"is_causal": True}, {"sliding_window": 31}])
def test_the_goldens_see_a_wrong_config(changes: dict[str, Any]) -> None:
    """Causality, and a window that is one too short: each is far outside the tolerance."""
    case, found = draft_case(), rounds("float32", **changes)["round1"]
    difference = worst(values(found, "norm")[0], case.expected["round1.hidden"])
    assert difference > 3 * case.tolerances["f32_hidden_abs"]


# The config.


def test_a_missing_is_causal_means_causal_for_sliding_layers() -> None:
    """As the published package reads it; the released config has the key."""
    assert Config.from_hf(SHIPPED).causal == (False,) * 5
    assert Config.from_hf(changed(is_causal=None)).causal == (True,) * 5
    full = changed(is_causal=None, layer_types=["full_attention"] * 5)
    assert Config.from_hf(full).causal == (False,) * 5
    assert Config.from_hf(full).windows == (None,) * 5


def test_windows_and_causality_reach_the_graph() -> None:
    graph = golden_round(is_causal=True, sliding_window=20).graph
    ops = [one.op for one in graph.body.nodes() if isinstance(one.op, BlockAttention)]
    assert {(one.causal, one.window) for one in ops} == {(True, 20)}


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "layer_types",
        "sliding_window",
        "dflash_config",
        "draft_block_size",
        "draft_mask_token_id",
        "draft_target_layer_ids",
        "num_target_layers",
        "rope_parameters",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(mkc.ConfigKeyError, match=f"'{key.removeprefix('draft_')}' is missing"):
        Config.from_hf(changed(**{key: None}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "5120"}, "'hidden_size' is '5120'"),
        ({"is_causal": "no"}, "'is_causal' is 'no'; expected true or false"),
        ({"draft_block_size": 1}, "'block_size' is 1; expected an integer of at least 2"),
        ({"draft_conv_group_size": 15}, "'hidden_size' is 5120; .* which is 15"),
        ({"draft_target_layer_ids": [5, 64]}, "expected a list of different layers"),
        ({"draft_target_layer_ids": [5, 5]}, "expected a list of different layers"),
        ({"draft_mask_token_id": 248320}, "'mask_token_id' is 248320; expected a token id below"),
        ({"layer_types": ["sliding_attention"] * 4}, "'layer_types' is .* list of 5 entries"),
        ({"num_attention_heads": 30}, "'num_attention_heads' is 30; .* which is 8"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.ConfigValueError, match=message):
        Config.from_hf(changed(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "biases in attention"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"draft_logit_softcap": 30.0}, "'logit_softcap' is 30.0"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "'rope_type' is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_an_unsupported_feature_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.UnsupportedFeatureError, match=message):
        Config.from_hf(changed(**keys))


def test_a_drafter_of_another_target_is_refused() -> None:
    with pytest.raises(mkc.MkcError, match="does not fit the target: it was made for an embedding"):
        golden_round(vocab_size=2048)
    layers = draft_case().meta["config"]["dflash_config"] | {"target_layer_ids": [1, 9]}
    with pytest.raises(mkc.MkcError, match="looks at layer 9, and the target shows layers 0 to 7"):
        golden_round(num_target_layers=12, dflash_config=layers)
    with pytest.raises(mkc.MkcError, match="at most the 64 positions of drafter 'dflash2'"):
        golden_round(max_position_embeddings=64)
