"""Rounds of the golden Kimi K3 model with its DSpark drafter.

They are compared with a published loop that recomputes everything in each round. Its first one has
drafts, made behind the prompt; rounds here begin without, so the first ones are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import Rounding
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.verify import verify
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import first_inputs
from mkc.runtime.rounds import keep_idle
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import pack_mask
from mkc.spec import LASTING
from mkc.spec import Round
from tests.kimi_goldens import kimi_case
from tests.kimi_goldens import kimi_player
from tests.spark_goldens import SPARK_TARGET
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_round
from tests.spark_goldens import spark_round_weights
from tests.spec.rounds import mask_inputs

PROMPT, DRAFTS = 48, 7
# Compiling takes most of the time here.
OPTIONS = COMPILER_OPTIONS | {"xla_backend_optimization_level": 0}


class Loop:
    """One sequence behind its prompt, a round at a time; changes in place.

    Args:
      changes: of the drafter's config.
    """

    def __init__(self, rounding: Rounding, **changes: Any) -> None:
        self.scheme = spark_round(**changes).masked
        self.masks: Masks = ()
        graph = self.scheme.graph
        self.weights = stack_params(graph, spark_round_weights(), rounding)
        self.sampling: dict[str, Any] = {
            "temperature": np.zeros(1, np.float32),
            "top_k": np.zeros(1, np.int32),
            "top_p": np.ones(1, np.float32),
            "min_p": np.zeros(1, np.float32),
            "seed": np.zeros((1, 2), np.int32),
        }
        self._round = jax.jit(
            lambda inputs, states: step_outputs(
                graph, self.weights, inputs, states, rounding=rounding
            ),
            compiler_options=OPTIONS,
        )
        self._after_prompt = _after_prompt(self.scheme, self.weights, rounding)
        self.restart()

    def restart(self, **sampling: Any) -> None:
        """Behind the prompt, with its first token as the anchor and no drafts."""
        self.sampling |= sampling
        self.masks = ()
        self.states = dict(self._after_prompt)
        anchor = kimi_case(SPARK_TARGET).expected["decode.tokens"][:1]
        anchors = Anchors(tokens=anchor, positions=np.array([PROMPT]))
        self.carried: dict[str, Any] = first_inputs(self.scheme, anchors)

    def propose(self, drafts: NDArray[Any]) -> None:
        """Replaces the drafts of the next round."""
        tokens, positions = np.array(self.carried["tokens"]), np.array(self.carried["positions"])
        tokens[1 : 1 + len(drafts)] = drafts
        positions[1:] = -1
        positions[1 : 1 + len(drafts)] = positions[0] + 1 + np.arange(len(drafts))
        self.carried |= {"tokens": tokens, "positions": positions}

    def next_round(self) -> list[int]:
        """What one round emits."""
        inputs = self.carried | self.sampling | mask_inputs(self.scheme, self.masks)
        outputs, self.states = self._round(inputs, self.states)
        self.carried = keep_idle(self.scheme, self.carried, outputs)
        self.logits = outputs["logits"]
        count = int(outputs["count"][0])
        return [int(one) for one in outputs["emitted"][:count]]

    def run(self, tokens: int) -> list[int]:
        """Rounds until so many tokens are emitted."""
        emitted: list[int] = []
        while len(emitted) < tokens:
            emitted += self.next_round()
        return emitted[:tokens]


def _after_prompt(scheme: Round, weights: Mapping[str, Any], rounding: Rounding) -> dict[str, Any]:
    states = initial_states(scheme.graph, rounding)
    own = {key: one for key, one in states.items() if scheme.graph.states[key].kind in LASTING}
    graph = with_rows_per_sequence(scheme.prefill, PROMPT)
    mine = {key: weights[key] for key in graph.params}
    run = jax.jit(
        lambda inputs, states: step_outputs(graph, mine, inputs, states, rounding=rounding),
        compiler_options=OPTIONS,
    )
    prompt = kimi_case(SPARK_TARGET).expected["prompt"]
    outputs, new = run({"tokens": prompt, "positions": np.arange(PROMPT)}, own)
    assert int(outputs["logits"][-1].argmax()) == expected_tokens()[0]
    return {**states, **new}


@cache
def loop(rounding: Rounding) -> Loop:
    return Loop(rounding)


def expected_tokens() -> list[int]:
    found: list[int] = kimi_case(SPARK_TARGET).expected["decode.tokens"].tolist()
    return found


def test_the_graph_of_a_round() -> None:
    """Eight rows, certain drafts, and a delta rule that keeps a decay of each key channel."""
    scheme = spark_round(batch=2)
    verify(scheme.graph)
    assert scheme.graph.rows_per_sequence == 1 + DRAFTS
    assert scheme.carried == ("tokens", "positions", "kept")
    ops = [node for node in scheme.graph.body.nodes() if isinstance(node.op, KeptDeltaRule)]
    assert ops
    for node in ops:
        shapes = [scheme.graph.states[key].type.shape for key in node.states]
        assert shapes == [(8, 32, 32), *[(1 + DRAFTS, 8, 32)] * 3]


def test_taps_show_what_enters_the_listed_layers() -> None:
    """And not what leaves them, which is another stream."""
    case, draft = kimi_case(SPARK_TARGET), spark_case()
    layers = draft.meta["config"]["aux_hidden_state_layer_ids"]
    tokens = [*case.expected["prompt"].tolist(), *expected_tokens()[:5]]
    player = kimi_player(SPARK_TARGET, "float32")
    residual = player.run(tokens, 0, player.empty()).residual
    expected = draft.expected["taps"]

    def difference(offset: int) -> float:
        shown = [residual[layer + offset] for layer in layers]
        return float(np.abs(np.concatenate(shown, axis=-1) - expected).max())

    # As for the residual streams of the target.
    tolerance = 10 * case.meta["checks"]["residual_f32_vs_numpy_f64"]["max_abs"]
    assert difference(0) < tolerance
    assert min(difference(-1), difference(1)) > 1000 * tolerance


def test_rounds_are_those_of_the_published_loop() -> None:
    """Emitted tokens, accepted drafts and proposals of all 36 rounds."""
    expected, player = spark_case().expected, loop("float32")
    player.restart()
    proposals = expected["loop.proposals"][:, :DRAFTS]
    player.propose(proposals[0])
    emitted = expected_tokens()[:1]
    for number, accepted in enumerate(expected["loop.accepted"].tolist()):
        new = player.next_round()
        assert len(new) == accepted + 1, f"round {number}"
        emitted += new
        if number + 1 < len(proposals):
            drafts = np.asarray(player.carried["tokens"])[1:]
            assert drafts.tolist() == proposals[number + 1].tolist(), f"round {number}"
    length = len(expected_tokens())
    assert emitted[:length] == expected["loop.tokens"].tolist() == expected_tokens()


def test_greedy_rounds_emit_what_plain_decoding_does() -> None:
    player = loop("float32")
    player.restart()
    assert player.run(len(expected_tokens()) - 1) == expected_tokens()[1:]


def test_greedy_rounds_in_bf16_differ_at_near_ties_only() -> None:
    """Plain decoding of what rounds emit gives each token a logit that leads, or nearly so: logits
    around 28 are an eighth apart in bf16."""
    player, plain = loop("reference"), kimi_player(SPARK_TARGET, "reference")
    case = plain.case
    player.restart()
    emitted = player.run(40)
    tokens = [*case.expected["prompt"].tolist(), expected_tokens()[0], *emitted]
    logits = plain.run(tokens[:-1], 0, plain.empty()).logits[PROMPT:]
    lead = logits.max(axis=-1) - logits[np.arange(len(emitted)), emitted]
    assert lead.max() < case.tolerances["bf16_logits_rms"]
    assert (lead == 0).mean() > 0.9


@pytest.mark.parametrize("block", ["verify0", "verify4", "verify7"])
def test_states_behind_accepted_drafts(block: str) -> None:
    """Given drafts of which 0, 4 or all are right: the state is that of the accepted ones."""
    case, player = kimi_case(SPARK_TARGET), loop("float32")
    expected = case.expected
    player.restart()
    player.propose(expected[f"{block}.block"][1:])
    emitted = player.next_round()
    accepted = int(expected[f"{block}.accepted"][0])
    assert len(emitted) == accepted + 1
    assert emitted[-1] == expected[f"{block}.bonus"][0]
    states = committed(player.scheme.graph, player.states, jnp.array([accepted + 1]))
    shown, names = kimi_player(SPARK_TARGET, "float32"), []
    for name, wanted in sorted(expected.items()):
        if name.startswith(f"{block}.state."):
            layer, kind = name.removeprefix(f"{block}.state.layer").split(".")
            found = shown.state(states, int(layer), kind)
            if kind in ("latent", "shared_key"):
                found = found[PROMPT : PROMPT + accepted + 1]
            assert np.abs(found - wanted).max() < case.tolerances["f32_state_abs"], name
            names.append(kind)
    assert set(names) == {"conv", "recurrent", "latent", "shared_key"}


def test_a_round_agrees_with_the_graphs_roundings() -> None:
    case, player = kimi_case(SPARK_TARGET), loop("reference")
    player.restart()
    player.propose(case.expected["verify7.block"][1:])
    player.next_round()
    found = np.asarray(player.logits, np.float32)
    difference = np.sqrt(np.mean((found - case.expected["verify7.logits"]) ** 2, axis=-1))
    assert np.median(difference) < case.tolerances["bf16_logits_rms_of_median_position"]


# The early cut of a block.


def test_a_cut_block_emits_the_same_greedy_tokens() -> None:
    """And there are rounds with no, some and all drafts."""
    player = Loop("float32", confidence_threshold=0.5)
    emitted: list[int] = []
    drafts: list[int] = []
    while len(emitted) < len(expected_tokens()) - 1:
        emitted += player.next_round()
        drafts.append(int((np.asarray(player.carried["positions"])[1:] >= 0).sum()))
    assert emitted[: len(expected_tokens()) - 1] == expected_tokens()[1:]
    assert {0, DRAFTS} < set(drafts)


def test_states_of_a_round_are_the_lasting_and_the_kept_ones() -> None:
    kinds = {one.kind for one in spark_round().graph.states.values()}
    assert kinds == {*LASTING, StateKind.KEPT, StateKind.TAP}


def test_masked_rounds_emit_the_tokens_of_masked_decoding() -> None:
    """Masks depend on what was emitted; drafts are those of masked decoding, once with a fault."""
    run, length = loop("float32"), DRAFTS + 1

    def mask_behind(output: list[int]) -> NDArray[np.uint32]:
        vocab = run.logits.shape[1]
        return pack_mask(np.arange(vocab) % 3 != sum(output) % 3)

    def first_round(drafts: list[int], wrong: int | None) -> list[int]:
        """One round behind the prompt with these drafts, and masks along them."""
        run.restart(temperature=np.zeros(1, np.float32))
        if wrong is not None:
            drafts = [*drafts[:wrong], drafts[wrong] ^ 1, *drafts[wrong + 1 :]]
        run.propose(np.array(drafts, np.int32))
        behind = [mask_behind(drafts[:count]) for count in range(len(drafts) + 1)]
        run.masks = [*behind, *[None] * (length - len(behind))]
        return run.next_round()

    run.restart(temperature=np.zeros(1, np.float32))
    run.next_round()
    truth: list[int] = []
    while len(truth) < length:
        truth += first_round(truth, None)[len(truth) :]
    assert all(one % 3 != sum(truth[:place]) % 3 for place, one in enumerate(truth))
    assert truth != expected_tokens()[1 : 1 + length], "nothing was forbidden"
    assert first_round(truth[:DRAFTS], None) == truth
    assert first_round(truth[:DRAFTS], 4) == truth[:5]
