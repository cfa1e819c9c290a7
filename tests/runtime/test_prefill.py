"""Prefill over the kernel's operands against token-by-token decoding, with bf16 roundings."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.ir.graph import StateKind
from mkc.ir.reference import compile_step
from mkc.prompt_blocks import block_sizes
from mkc.prompt_blocks import divide_prompt
from tests.goldens import CASES
from tests.goldens import CONTEXT
from tests.goldens import golden_case
from tests.ir.test_reference_goldens import PROMPT
from tests.ir.test_reference_goldens import prompt_run
from tests.ir.test_reference_goldens import rms
from tests.runtime.prefilled import check_after_prompt_tokens
from tests.runtime.prefilled import check_logits
from tests.runtime.prefilled import check_states
from tests.runtime.prefilled import empty
from tests.runtime.prefilled import feed
from tests.runtime.prefilled import prefill_for
from tests.runtime.prefilled import program_for
from tests.runtime.prefilled import prompt_of
from tests.runtime.prefilled import session_for
from tests.runtime.prefilled import snapshot

DECODED = 6  # steps of a kernel after a prompt
# Both programs full and padded, a border between them, and a single row.
SOME_SPLITS = (1, 15, 16, 17, 33, 47)


@pytest.mark.parametrize("split", range(1, PROMPT))
@pytest.mark.parametrize("name", CASES)
def test_every_split_of_a_prompt(name: str, split: int) -> None:
    """Two pieces, with checks after each: any piece may follow any state."""
    session = empty(session_for(name, 1, 1))
    prefill, prompt = prefill_for(name, 1, 1), prompt_of(name)
    first = prefill.run(session.operands, prompt[:split])
    check_after_prompt_tokens(name, session, 0, split, first.logits)
    second = prefill.run(session.operands, prompt[split:], start=split)
    check_after_prompt_tokens(name, session, 0, PROMPT, second.logits)
    assert int(second.next_token[0]) == np.asarray(second.logits)[0].argmax()


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(split, marks=[] if split in SOME_SPLITS else [pytest.mark.long])
        for split in range(1, PROMPT)
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_splits_on_two_ranks(name: str, split: int) -> None:
    session = empty(session_for(name, 2, 1))
    prompt = prompt_of(name)
    logits = feed(prefill_for(name, 2, 1), session, [prompt[:split], prompt[split:]])
    check_after_prompt_tokens(name, session, 0, PROMPT, logits)


def test_eight_ranks_with_copied_heads() -> None:
    """Four key heads on eight ranks: the copies of a cache hold the same bits."""
    name = "qwen38_mini"
    session = empty(session_for(name, 8, 1))
    prompt = prompt_of(name)
    logits = feed(prefill_for(name, 8, 1), session, [prompt[:17], prompt[17:]])
    check_after_prompt_tokens(name, session, 0, PROMPT, logits)
    copied = {
        key: one.copies
        for key, one in session.lowered.steps.sharded.states.items()
        if one.copies > 1
    }
    assert copied, "no state is held twice"
    for key, copies in copied.items():
        parts = session.rank_parts(session.layout.operand_of(key))
        for rank, part in enumerate(parts):
            assert part.tobytes() == parts[rank - rank % copies].tobytes(), key


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_goes_on_after_a_prompt(name: str) -> None:
    """Decoding after prefill agrees with the recorded tokens and logits."""
    case = golden_case(name)
    session = empty(session_for(name, 1, 1))
    result = prefill_for(name, 1, 1).run(session.operands, prompt_of(name))
    assert int(result.next_token[0]) == int(case.expected["decode.tokens"][0])
    for number in range(DECODED):
        step = session.step(case.expected["decode.tokens"][number : number + 1], [PROMPT + number])
        assert step.logits is not None
        check_logits(name, step.logits[0], case.expected["decode.logits"][number + 1])


@pytest.mark.parametrize("name", CASES)
def test_the_reference_evaluator_goes_on_after_a_prompt_on_two_ranks(name: str) -> None:
    """States come back from the ranks as the states of the graph."""
    case = golden_case(name)
    session = empty(session_for(name, 2, 1))
    prefill_for(name, 2, 1).run(session.operands, prompt_of(name))
    graph = case.graph()
    states = {key: jax.numpy.asarray(session.state(key)) for key in graph.states}
    step = compile_step(graph, case.weights())
    for number in range(DECODED):
        tokens = case.expected["decode.tokens"][number : number + 1]
        result = step(tokens, [PROMPT + number], states)
        states = result.states
        expected = case.expected["decode.logits"][number + 1]
        check_logits(name, result.outputs["logits"][0], expected)


def test_prefill_goes_on_after_the_kernel() -> None:
    """Several turns: prompt, decoding, prompt again."""
    name = CASES[0]
    session = empty(session_for(name, 1, 1))
    prefill, prompt = prefill_for(name, 1, 1), prompt_of(name)
    prefill.run(session.operands, prompt[:19])
    for position in range(19, 24):
        session.step(np.array(prompt[position : position + 1]), np.array([position]))
    result = prefill.run(session.operands, prompt[24:], start=24)
    check_after_prompt_tokens(name, session, 0, PROMPT, result.logits)


def test_other_sequences_keep_their_bits() -> None:
    """One slot of three is filled; the states of the others do not change."""
    name = CASES[0]
    session = empty(session_for(name, 1, 3))
    prefill, prompt = prefill_for(name, 1, 3), prompt_of(name)
    feed(prefill, session, [prompt[:20]], slot=2)
    before = {key: session.state(key) for key in session.lowered.steps.sharded.full.states}
    logits = feed(prefill, session, [prompt], slot=1)
    check_after_prompt_tokens(name, session, 1, PROMPT, logits)
    for key, old in before.items():
        new = session.state(key)
        for slot in (0, 2):
            assert new[:, slot].tobytes() == old[:, slot].tobytes(), f"{key}, sequence {slot}"


@pytest.mark.parametrize("count", [0, 1, 2, 5, 15])
@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_changes_nothing(ranks: int, count: int) -> None:
    """Whatever stands in the padding: the same bits in states and logits."""
    name, rows = CASES[0], 16
    program, prompt = program_for(name, ranks, 1, rows), prompt_of(name)
    session = empty(session_for(name, ranks, 1))
    prefill_for(name, ranks, 1).run(session.operands, prompt[:20])
    before, operands = snapshot(session), dict(session.operands)
    seen = []
    for padding in (0, 777):
        tokens = [*prompt[20 : 20 + count], *[padding] * (rows - count)]
        scalars = [np.array(one, np.int32) for one in (tokens, [0], [20], [count])]
        states = tuple(jax.numpy.copy(operands[one.name]) for one in program.states)
        weights = tuple(operands[one.name] for one in program.weights)
        _, logits, states = program.compiled(*scalars, weights, states)
        session.operands.update(zip((one.name for one in program.states), states, strict=True))
        seen.append((snapshot(session), np.asarray(logits).tobytes() if count else b""))
    assert seen[0] == seen[1]
    if count == 0:
        assert seen[0][0] == before
    else:
        assert all(seen[0][0][key] != before[key] for key in before)


def test_several_lanes_at_once() -> None:
    """Two of three sequences, of different lengths and positions, as if one after the other."""
    name, rows = CASES[0], 16
    program, prompt = program_for(name, 1, 3, rows, lanes=2), prompt_of(name)
    session = empty(session_for(name, 1, 3))
    prefill_for(name, 1, 3).run(session.operands, prompt[:20], slot=2)
    result = program(session.operands, [prompt[20:36], prompt[:7]], slots=[2, 0], starts=[20, 0])
    single = prompt_run(name, "reference")
    for lane, (slot, end) in enumerate([(2, 36), (0, 7)]):
        check_logits(name, result.logits[lane], single.logits[end - 1])
        check_states(session, slot, single.states[end - 1], end)


@pytest.mark.parametrize("name", CASES)
def test_logits_of_all_rows(name: str) -> None:
    case = golden_case(name)
    session = empty(session_for(name, 1, 1))
    program = program_for(name, 1, 1, PROMPT, all_rows=True)
    result = program(session.operands, [prompt_of(name)], slots=[0], starts=[0])
    logits = np.asarray(result.logits)[0]
    check_logits(name, logits, case.expected["prefill.logits"])
    assert (np.asarray(result.next_token)[0] == logits.argmax(axis=-1)).all()


def test_up_to_the_end_of_the_context() -> None:
    """A padded block whose rows would reach behind the context changes the last rows only."""
    name = CASES[0]
    session = empty(session_for(name, 1, 1))
    tokens = [(37 * place) % 1000 for place in range(CONTEXT)]
    found = []
    for pieces in ([tokens[:64], tokens[64:]], [tokens[:64], tokens[64:123], tokens[123:]]):
        empty(session)
        logits = np.asarray(feed(prefill_for(name, 1, 1), session, pieces))
        found.append(
            (logits, {key: session.state(key) for key in golden_case(name).graph().states})
        )
    check_logits(name, found[1][0], found[0][0])
    for key, state in golden_case(name).graph().states.items():
        one, other = (each[1][key].astype(np.float32) for each in found)
        assert rms(other, one) < 0.03 * one.std(), key
        if state.kind is StateKind.KV_CACHE:
            assert (one[:, :, :64] == other[:, :, :64]).all(), key


def test_a_prompt_comes_back_block_by_block() -> None:
    name = CASES[0]
    session = empty(session_for(name, 1, 1))
    prompt = (prompt_of(name) * 3)[:100]
    ends = [
        end for end, _ in prefill_for(name, 1, 1).blocks(session.operands, prompt, slot=0, start=5)
    ]
    assert ends == [69, 105]


def test_too_many_tokens_are_refused() -> None:
    name = CASES[0]
    session = empty(session_for(name, 1, 1))
    program = program_for(name, 1, 1, 16)
    with pytest.raises(AssertionError, match="17 tokens for 16 rows"):
        program(session.operands, [[1] * 17], slots=[0], starts=[0])
    with pytest.raises(AssertionError, match="position 128 in a context of 128"):
        program(session.operands, [[1] * 9], slots=[0], starts=[120])


@pytest.mark.parametrize(
    ("context", "sizes"),
    [
        (8, (8,)),
        (16, (16,)),
        (128, (16, 64)),
        (4096, (16, 64, 256)),
        (131_072, (16, 64, 256, 1024)),
    ],
)
def test_few_sizes(context: int, sizes: tuple[int, ...]) -> None:
    assert block_sizes(context) == sizes


@given(st.integers(1, 5000), st.sets(st.sampled_from([4, 16, 64, 100, 256, 1024]), min_size=1))
def test_a_prompt_is_divided_into_the_fewest_blocks(tokens: int, sizes: set[int]) -> None:
    blocks = divide_prompt(tokens, sorted(sizes))
    assert set(blocks) <= sizes
    assert len(blocks) == -(-tokens // max(sizes))
    padding = sum(blocks) - tokens
    assert 0 <= padding < blocks[-1]
    smaller = [size for size in sizes if size < blocks[-1]]
    assert all(sum(blocks[:-1]) + size < tokens for size in smaller)
