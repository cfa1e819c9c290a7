"""Several rows per sequence and step: the same as one after the other, and padding is nothing.

Blocks of the goldens are fed at once; the library that computed them saw them in one go, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import mkc
from mkc.ir.graph import StateKind
from mkc.ir.reference import Evaluation
from mkc.ir.reference import StepFunction
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.text import print_graph
from mkc.ir.verify import findings
from models.qwen38 import MODEL
from tests.goldens import CASES
from tests.goldens import CONTEXT
from tests.goldens import golden_case
from tests.ir.test_reference_goldens import PROMPT
from tests.ir.test_reference_goldens import prompt_run
from tests.ir.test_reference_goldens import rms
from tests.ir.test_reference_goldens import state_pairs
from tests.ir.test_reference_goldens import worst

CHUNK = 16
BLOCK = 8


@cache
def block_step(name: str, rows: int, batch: int = 1) -> StepFunction:
    case = golden_case(name)
    graph = with_rows_per_sequence(case.graph(batch=batch), rows)
    return compile_step(graph, case.weights(), rounding="float32")


def positions(start: int, count: int, rows: int) -> list[int]:
    """`count` rows from `start`, then padding."""
    return [start + row if row < count else -1 for row in range(rows)]


def feed(name: str, rows: int, tokens: Sequence[int], start: int, states: Any) -> Evaluation:
    """One step with `tokens`, filled up with tokens that must not matter."""
    padding = [1 + (7 * row) % 50 for row in range(rows - len(tokens))]
    step = block_step(name, rows)
    return step([*tokens, *padding], positions(start, len(tokens), rows), states)


def empty_states(name: str) -> Mapping[str, Any]:
    return initial_states(golden_case(name).graph(), "float32")


def in_chunks(
    name: str, pieces: Sequence[Sequence[int]]
) -> tuple[NDArray[np.float32], Mapping[str, Any]]:
    """Logits of all tokens and the last states; every piece goes in chunks of 16."""
    states = empty_states(name)
    logits, start = [], 0
    for piece in pieces:
        for first in range(0, len(piece), CHUNK):
            tokens = piece[first : first + CHUNK]
            result = feed(name, CHUNK, tokens, start, states)
            states = result.states
            logits.append(np.asarray(result.outputs["logits"], np.float32)[: len(tokens)])
            start += len(tokens)
    return np.concatenate(logits), states


def check_prompt(name: str, logits: NDArray[np.float32], states: Mapping[str, Any]) -> None:
    case = golden_case(name)
    assert worst(logits, case.expected["prefill.logits"]) < case.tolerances["f32_logits_abs"]
    for label, state, expected in state_pairs(case, states, "prefill", 0, PROMPT):
        assert worst(state, expected) < case.tolerances["f32_state_abs"], label


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_in_one_go(name: str) -> None:
    prompt = golden_case(name).expected["prompt"].tolist()
    result = feed(name, PROMPT, prompt, 0, empty_states(name))
    check_prompt(name, np.asarray(result.outputs["logits"], np.float32), result.states)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("split", range(1, PROMPT))
def test_the_prompt_in_chunks_after_any_split(name: str, split: int) -> None:
    """Two pieces, each in chunks whose last is padded: continues from any position."""
    prompt = golden_case(name).expected["prompt"].tolist()
    check_prompt(name, *in_chunks(name, [prompt[:split], prompt[split:]]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", ["verify0", "verify4", "verify7"])
def test_a_block_of_eight_rows_after_the_prompt(name: str, block: str) -> None:
    """Logits of all rows, then states after the accepted ones, the others being padding."""
    case = golden_case(name)
    expected = case.expected
    tokens = expected[f"{block}.block"].tolist()
    states = prompt_run(name, "float32").states[-1]
    result = feed(name, BLOCK, tokens, PROMPT, states)
    assert (
        worst(np.asarray(result.outputs["logits"], np.float32), expected[f"{block}.logits"])
        < (case.tolerances["f32_logits_abs"])
    )
    assert result.outputs["next_token"].tolist() == expected[f"{block}.argmax"].tolist()
    rows = int(expected[f"{block}.accepted"][0]) + 1
    accepted = feed(name, BLOCK, tokens[:rows], PROMPT, states)
    for label, state, wanted in state_pairs(case, accepted.states, block, PROMPT, rows):
        assert worst(state, wanted) < case.tolerances["f32_state_abs"], label


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_padding_changes_nothing(count: int) -> None:
    """Whatever the padding holds, states and the logits of the other rows keep their bits."""
    name = CASES[0]
    states = prompt_run(name, "float32").states[-1]
    step = block_step(name, BLOCK)
    results = [
        step([9] * count + [padding] * (BLOCK - count), positions(PROMPT, count, BLOCK), states)
        for padding in (3, 500)
    ]
    first, second = (np.asarray(one.outputs["logits"])[:count] for one in results)
    assert first.tobytes() == second.tobytes()
    for key, before in states.items():
        a, b = (np.asarray(one.states[key]) for one in results)
        assert a.tobytes() == b.tobytes(), key
        assert (a.tobytes() == np.asarray(before).tobytes()) == (count == 0), key


def test_sequences_of_a_batch_have_their_own_lengths() -> None:
    """Three sequences with 8, 3 and no rows: each as if alone, caches written nowhere else."""
    name, counts = CASES[0], (8, 3, 0)
    graph = golden_case(name).graph()
    states = prompt_run(name, "float32").states[-1]
    batched = {key: jnp.repeat(one, 3, axis=1) for key, one in states.items()}
    tokens = np.arange(3 * BLOCK) + 20
    step = block_step(name, BLOCK, batch=3)
    where = [place for count in counts for place in positions(PROMPT, count, BLOCK)]
    result = step(tokens, where, batched)
    for sequence, count in enumerate(counts):
        mine = tokens[sequence * BLOCK :][:count].tolist()
        alone = feed(name, BLOCK, mine, PROMPT, states)
        rows = slice(sequence * BLOCK, sequence * BLOCK + count)
        np.testing.assert_allclose(
            result.outputs["logits"][rows], alone.outputs["logits"][:count], rtol=0, atol=2e-5
        )
        for key, state in graph.states.items():
            found, expected = result.states[key][:, sequence], alone.states[key][:, 0]
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5, err_msg=key)
            if state.kind is StateKind.KV_CACHE:
                assert not np.asarray(found)[:, PROMPT + count :].any(), key


def test_roundings_are_those_of_one_row_steps() -> None:
    """With the graph's roundings a block agrees with single steps within the bf16 tolerance."""
    case = golden_case("qwen38_lane")
    graph = with_rows_per_sequence(case.graph(), PROMPT)
    result = compile_step(graph, case.weights())(
        case.expected["prompt"], np.arange(PROMPT), initial_states(case.graph())
    )
    single = prompt_run(case.name, "reference")
    logits = np.asarray(result.outputs["logits"], np.float32)
    assert worst(logits, single.logits) < case.tolerances["bf16_logits_abs"]
    assert rms(logits, single.logits) < case.tolerances["bf16_logits_rms"]


@pytest.mark.parametrize("name", CASES)
def test_a_graph_with_more_rows_is_the_traced_one(name: str) -> None:
    """Same names, ops and types; and valid."""
    config = golden_case(name).meta["config"]
    traced = MODEL.trace(config, batch=2, context=CONTEXT, rows_per_sequence=4)
    assert (traced.rows, traced.rows_per_sequence) == (8, 4)
    single = MODEL.trace(config, batch=2, context=CONTEXT)
    assert print_graph(with_rows_per_sequence(single, 4)) == print_graph(traced)
    assert print_graph(with_rows_per_sequence(traced, 1)) == print_graph(single)
    assert findings(traced) == []


def test_a_model_sees_its_rows() -> None:
    seen = []

    def model(step: mkc.Step) -> mkc.Outputs:
        seen.append((step.rows, step.batch, step.tokens.shape))
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [16, 8]))
        return mkc.next_token(h, mkc.param("lm_head.weight", [16, 8]))

    mkc.trace(model, name="one", batch=2, context=16, rows_per_sequence=5)
    assert seen == [(10, 2, (10,))]
