"""Eight rows of a sequence at once: logits, acceptance, and states after any accepted count.

Numbers of a public library for three blocks, and every count against decoding one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.reference import compile_step
from models.qwen38 import MODEL
from tests.goldens import CONTEXT
from tests.goldens import golden_case
from tests.goldens import layer_state
from tests.spec.rounds import Player
from tests.spec.rounds import spec_scheme

CASE = golden_case("qwen38_mini")
PROMPT: list[int] = CASE.expected["prompt"].tolist()
TOKENS: list[int] = CASE.expected["decode.tokens"].tolist()
VOCAB = 1024
STATES = {
    "conv": "linear_attn.conv",
    "recurrent": "linear_attn.recurrent",
    "key": "self_attn.kv.key",
    "value": "self_attn.kv.value",
}


def worst(found: NDArray[Any], expected: NDArray[Any]) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


BLOCKS = ("verify4", "verify0", "verify7")
BATCH = 4


def test_golden_blocks() -> None:
    """Logits of all rows, what is accepted, and the states after the accepted prefix.

    All three blocks at once, each in a sequence of its own; the fourth is idle.
    """
    blocks = [CASE.expected[f"{name}.block"].tolist() for name in BLOCKS]
    player = Player(spec_scheme(BATCH), "float32")
    player.prefill([PROMPT] * 3)
    player.start([*(one[0] for one in blocks), 0], [len(PROMPT)] * 3 + [-1])
    for number, block in enumerate(blocks):
        player.draft(number, block[1:])
    emitted, logits = player.round()
    states = player.committed()
    assert not emitted[3]
    for number, (name, block) in enumerate(zip(BLOCKS, blocks, strict=True)):
        expected = CASE.expected[f"{name}.logits"]
        assert worst(logits[number], expected) < CASE.tolerances["f32_logits_abs"]
        accepted = int(CASE.expected[f"{name}.accepted"][0])
        bonus = int(CASE.expected[f"{name}.bonus"][0])
        assert emitted[number] == [*block[1 : accepted + 1], bonus]
        labels = [one for one in CASE.expected if one.startswith(f"{name}.state.")]
        assert len(labels) >= 4
        for label in labels:
            layer, part = label.removeprefix(f"{name}.state.layer").split(".")
            state = layer_state(player.scheme.graph, states, int(layer), STATES[part])[number]
            if part in ("key", "value"):
                state = state[len(PROMPT) : len(PROMPT) + 1 + accepted]
            assert worst(state, CASE.expected[label]) < CASE.tolerances["f32_state_abs"], label


# One by one. Sixteen starts: each place of a tile of cache rows.

STARTS = 16


@cache
def one_by_one() -> list[dict[str, NDArray[Any]]]:
    """States of the target after each of the first tokens that follow the prompt.

    The model's own step, which commits nothing late.
    """
    prompt = Player(spec_scheme(BATCH), "float32")
    prompt.prefill([PROMPT])
    graph = MODEL.trace(CASE.meta["config"], batch=1, context=CONTEXT)
    step = compile_step(graph, CASE.weights(), rounding="float32")
    states: Mapping[str, Any] = {key: prompt.states[key][:, :1] for key in graph.states}
    found = [states]
    for place, token in enumerate(TOKENS[: STARTS + 8]):
        states = step([token], [len(PROMPT) + place], states).states
        found.append(states)
    return [{key: np.asarray(one, np.float32) for key, one in states.items()} for states in found]


@pytest.mark.parametrize("first", range(0, STARTS, BATCH))
def test_any_accepted_count_leaves_the_state_of_decoding_one_by_one(first: int) -> None:
    """Four sequences at four positions; in each round each has another count of all eight."""
    expected = one_by_one()
    prompts = [[*PROMPT, *TOKENS[: first + one]] for one in range(BATCH)]
    player = Player(spec_scheme(BATCH), "float32")
    for counts in (range(BATCH), range(BATCH, 2 * BATCH)):
        player.states = Player(spec_scheme(BATCH), "float32").states
        player.prefill(prompts)
        player.start([TOKENS[first + one] for one in range(BATCH)], [len(one) for one in prompts])
        for one, count in enumerate(counts):
            player.draft(one, wrong_at(TOKENS[first + one + 1 : first + one + 8], count))
        emitted, _ = player.round()
        states = player.committed()
        for one, count in enumerate(counts):
            start = first + one
            assert emitted[one] == TOKENS[start + 1 : start + count + 2]
            after = expected[start + 1 + count]
            for key, state in after.items():
                mine = states[key][:, one]
                want = state[:, 0]
                if ".kv." in key:
                    rows = len(PROMPT) + start + 1 + count
                    mine, want = mine[:, :rows], want[:, :rows]
                assert worst(mine, want) < CASE.tolerances["f32_state_abs"], (key, one, count)


def wrong_at(drafts: list[int], place: int) -> list[int]:
    """The drafts with one replaced; as they are when `place` is behind them."""
    return [(one + 1) % VOCAB if n == place else one for n, one in enumerate(drafts)]


def test_a_wrong_count_is_seen() -> None:
    """One row more or fewer than accepted is far outside the tolerance of the test above."""
    player = Player(spec_scheme(BATCH), "float32")
    player.prefill([PROMPT])
    player.start([TOKENS[0], 0, 0, 0], [len(PROMPT), -1, -1, -1])
    player.draft(0, wrong_at(TOKENS[1:8], 3))
    player.round()
    states = player.committed()
    for off in (-1, 1):
        other = one_by_one()[4 + off]
        for key, state in other.items():
            if "linear_attn" in key:
                difference = worst(states[key][:, 0], state[:, 0])
                assert difference > 10 * CASE.tolerances["f32_state_abs"], (key, off)


def test_an_idle_sequence_keeps_every_bit() -> None:
    """States, kept rows and what is carried, while another sequence goes on."""
    player = Player(spec_scheme(BATCH), "float32")
    player.prefill([PROMPT, PROMPT[:30]])
    player.start([TOKENS[0], 7, 0, 0], [len(PROMPT), 30, -1, -1])
    player.draft(1, [1, 2, 3])
    player.round()
    before = {key: np.asarray(one)[:, 1].tobytes() for key, one in player.states.items()}
    positions = np.array(player.carried["positions"]).reshape(BATCH, -1)
    kept, tokens = np.array(player.carried["kept"])[1], np.array(player.carried["tokens"])
    assert kept >= 1
    positions[1] = -1
    player.carried |= {"positions": positions.reshape(-1)}
    for _ in range(2):
        emitted, _ = player.round()
        assert emitted[0]
        assert not emitted[1]
    after = {key: np.asarray(one)[:, 1].tobytes() for key, one in player.states.items()}
    assert after == before
    assert np.array(player.carried["kept"])[1] == kept
    assert np.array(player.carried["tokens"])[8:16].tolist() == tokens[8:16].tolist()
