"""The generation loop on a backend without a model: slots, ends, text, and independence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.errors import GenerationOptionError
from mkc.errors import NotFiniteLogitsError
from mkc.errors import NoTokenAllowedError
from mkc.errors import PromptLengthError
from mkc.errors import PromptTokenError
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import Tokenizer
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from mkc.runtime.text.messages import ChatRequest
from tests.runtime.constraints import Constraint
from tests.runtime.fake_backend import VOCAB
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.generated import PROMPT
from tests.runtime.generated import generate
from tests.runtime.generated import greedy
from tests.runtime.text.checkpoints import byte_level_checkpoint

NOTHING = np.zeros(VOCAB, bool)


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer trained here."""
    with TemporaryDirectory() as folder:
        byte_level_checkpoint(Path(folder))
        return load_tokenizer(Path(folder), vocab=VOCAB)


def writes(text: str) -> FakeBackend:
    """A backend that, after a prompt of three tokens, writes a text again and again."""
    script = tokenizer().encode(text, allow_special=True)

    def logits(history: Sequence[int]) -> Array:
        row = np.zeros(VOCAB, np.float32)
        row[script[(len(history) - len(PROMPT)) % len(script)]] = 9
        return row

    return FakeBackend(logits=logits, rounds=4)


# How outputs end.


@pytest.mark.parametrize("rounds", [1, 3, 8])
def test_greedy_output_up_to_max_tokens(rounds: int) -> None:
    generator = Generator(FakeBackend(rounds=rounds))
    output = generator.generate(Request(tokens=PROMPT, max_tokens=7))
    assert output.tokens == greedy(PROMPT, 7)
    assert output.finish.reason is FinishReason.LENGTH
    assert output.text == ""  # without a tokenizer


def test_an_output_fills_the_context_when_nothing_ends_it() -> None:
    generator = Generator(FakeBackend(context=20, rounds=4))
    output = generator.generate(Request(tokens=PROMPT))
    assert output.tokens == greedy(PROMPT, 17)
    assert output.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("of", ["request", "generator"])
def test_stop_ids(rounds: int, of: str) -> None:
    """The stop id is among the tokens, and the last of them."""
    expected = greedy(PROMPT, 6)
    ids = frozenset({expected[5]})
    generator = Generator(FakeBackend(rounds=rounds), stop_ids=ids if of == "generator" else ())
    request = Request(tokens=PROMPT, stop_ids=ids if of == "request" else frozenset())
    output = generator.generate(request)
    assert output.tokens == expected
    assert output.finish.reason is FinishReason.STOP
    assert output.finish.stop == expected[5]


def test_ignore_eos_goes_past_the_stop_ids_of_the_checkpoint_only() -> None:
    expected = greedy(PROMPT, 8)
    generator = Generator(FakeBackend(), stop_ids={expected[3]})
    request = Request(tokens=PROMPT, ignore_eos=True, stop_ids=frozenset({expected[7]}))
    assert generator.generate(request).tokens == expected


def test_stop_ids_are_not_chosen_before_min_tokens() -> None:
    first, second = greedy(PROMPT, 2)
    generator = Generator(FakeBackend(rounds=4), stop_ids={first, second})
    output = generator.generate(Request(tokens=PROMPT, min_tokens=3, max_tokens=9))
    assert len(output.tokens) >= 3
    assert not {first, second} & set(output.tokens[:3])
    assert generator.generate(Request(tokens=PROMPT, max_tokens=9)).tokens == (first,)


@pytest.mark.parametrize(
    ("stop", "include", "shown"),
    [
        ("weather", False, "the cat sat on the "),
        ("weather", True, "the cat sat on the weather"),
        ("at s", False, "the c"),  # across tokens
        ("e", False, "th"),  # inside a token
    ],
)
def test_stop_strings_end_the_output_and_are_not_shown(
    stop: str, include: bool, shown: str
) -> None:
    backend = writes("the cat sat on the weather in the city")
    generator = Generator(backend, tokenizer=tokenizer(), stop_ids=())
    request = Request(tokens=PROMPT, stop_strings=(stop, "never"), include_stop=include)
    output = generator.generate(request)
    assert output.text == shown
    assert output.finish.reason is FinishReason.STOP
    assert output.finish.stop == stop
    assert stop in tokenizer().decode(output.tokens)
    assert stop not in tokenizer().decode(output.tokens[:-1]), "it ends with the completing token"


def test_text_held_back_for_a_stop_string_appears_at_the_end() -> None:
    backend = writes("the cat sat")
    count = len(tokenizer().encode("the cat sat", allow_special=False))
    generator = Generator(backend, tokenizer=tokenizer(), stop_ids=())
    request = Request(tokens=PROMPT, stop_strings=("sat on",), max_tokens=count)
    output = generator.generate(request)
    assert output.text == "the cat sat"
    assert output.finish.reason is FinishReason.LENGTH


def test_no_delta_shows_half_a_character() -> None:
    backend = writes("早上好🙂")
    generator = Generator(backend, tokenizer=tokenizer(), stop_ids=())
    texts = [one.text for one in generator.run([Request(tokens=PROMPT, max_tokens=20)])]
    assert "\ufffd" not in "".join(texts[:-1])
    assert "".join(texts).startswith("早上好🙂早上好🙂"[:5])


def test_the_text_of_a_stop_id_is_not_shown() -> None:
    generator = Generator(writes("a cat<|end|>"), tokenizer=tokenizer())
    output = generator.generate(Request(tokens=PROMPT))
    assert output.text == "a cat"
    assert output.finish.stop == tokenizer().special_tokens["<|end|>"]


def test_a_chat_reads_thoughts_and_content(tmp_path: Path) -> None:
    """The request's own output reader says what the text means and where it stops."""
    byte_level_checkpoint(tmp_path)
    chat = load_chat(tmp_path, tokenizer())
    prompt = chat.encode(ChatRequest(messages=[{"role": "user", "content": "the cat"}]))
    script = tokenizer().encode("so\n</think>\n\n19<|end|>", allow_special=True)
    start = len(prompt.ids)

    def logits(history: Sequence[int]) -> Array:
        row = np.zeros(VOCAB, np.float32)
        row[script[len(history) - start]] = 1
        return row

    generator = Generator(FakeBackend(context=200, logits=logits), tokenizer=tokenizer())
    output = generator.generate(Request(tokens=prompt.ids, output=chat.output(prompt)))
    thoughts = [one.text for one in output.events if isinstance(one, ReasoningDelta)]
    content = [one.text for one in output.events if isinstance(one, ContentDelta)]
    assert "".join(thoughts).strip() == "so"
    assert "".join(content) == output.text == "19"
    assert output.finish.reason is FinishReason.STOP


# What is refused.


def test_a_prompt_longer_than_the_context_names_both_lengths() -> None:
    generator = Generator(FakeBackend(context=16))
    with pytest.raises(PromptLengthError, match=r"17 tokens.*16 positions"):
        generator.add(Request(tokens=[1] * 17))
    with pytest.raises(PromptLengthError, match=r"16 tokens.*16 positions"):
        generator.add(Request(tokens=[1] * 16))
    with pytest.raises(PromptLengthError, match=r"10 tokens and 7 tokens to generate.*16"):
        generator.add(Request(tokens=[1] * 10, max_tokens=7))
    assert generator.free_slots == 1
    assert len(generator.generate(Request(tokens=[1] * 15)).tokens) == 1


@pytest.mark.parametrize(
    ("tokens", "problem"), [([], "empty"), ([3, VOCAB], str(VOCAB)), ([-1], "-1")]
)
def test_prompts_that_are_none(tokens: list[int], problem: str) -> None:
    with pytest.raises(PromptTokenError, match=problem):
        Generator(FakeBackend()).add(Request(tokens=tokens))


def test_numbers_out_of_range() -> None:
    with pytest.raises(GenerationOptionError, match="max_tokens"):
        Request(tokens=PROMPT, max_tokens=0)
    with pytest.raises(GenerationOptionError, match="min_tokens"):
        Request(tokens=PROMPT, max_tokens=3, min_tokens=4)


def test_an_error_ends_its_own_sequence_only() -> None:
    """A mask that allows nothing, beside a sequence that goes on."""
    generator = Generator(FakeBackend(batch=2))
    blocked = Request(
        tokens=PROMPT,
        constraint=Constraint(lambda output: ~NOTHING if len(output) < 2 else NOTHING),
    )
    bad, good = generate(generator, [blocked, Request(tokens=(9,), max_tokens=6)])
    assert bad.finish.reason is FinishReason.ERROR
    assert isinstance(bad.finish.error, NoTokenAllowedError)
    assert bad.tokens == greedy(PROMPT, 2)
    assert good.tokens == greedy((9,), 6)
    assert generator.free_slots == 2


def test_logits_that_are_not_numbers() -> None:
    backend = FakeBackend(logits=lambda history: np.full(VOCAB, np.nan, np.float32))
    generator = Generator(backend)
    with pytest.raises(NotFiniteLogitsError, match="position 3"):
        generator.generate(Request(tokens=PROMPT))
    assert generator.free_slots == 1


# Slots.


def test_cancel_frees_the_slot_and_delivers_the_rest() -> None:
    backend = FakeBackend(batch=2)
    generator = Generator(backend)
    first = generator.add(Request(tokens=PROMPT))
    second = generator.add(Request(tokens=(9,), max_tokens=5))
    assert generator.free_slots == 0
    generator.rounds()
    last = generator.cancel(first)
    assert last.finish is not None
    assert last.finish.reason is FinishReason.CANCELLED
    assert generator.free_slots == 1
    assert backend.slots[0] == []
    assert generator.running == (second,)
    third = generator.add(Request(tokens=(8,), max_tokens=5))
    tokens: dict[int, list[int]] = {second: [], third: []}
    while generator.running:
        for delta in generator.rounds():
            tokens[delta.sequence] += delta.tokens
    assert tokens[second] == list(greedy((9,), 5))
    assert tokens[third] == list(greedy((8,), 5))


def test_cancel_before_the_prompt_has_been_read() -> None:
    generator = Generator(FakeBackend(), chunk_rows=2)
    number = generator.add(Request(tokens=[1] * 9))
    assert generator.rounds() == []  # the first chunk, nothing to say yet
    assert generator.cancel(number).tokens == ()
    assert generator.free_slots == 1


def test_more_requests_than_slots() -> None:
    requests = [Request(tokens=(number, 1), max_tokens=1 + number % 4) for number in range(9)]
    outputs = generate(Generator(FakeBackend(batch=3, rounds=2)), requests)
    assert [one.tokens for one in outputs] == [
        greedy(request.tokens, 1 + number % 4) for number, request in enumerate(requests)
    ]


def test_tokens_are_delivered_as_rounds_finish() -> None:
    generator = Generator(FakeBackend(rounds=3))
    deltas = list(generator.run([Request(tokens=PROMPT, max_tokens=8)]))
    assert [len(one.tokens) for one in deltas] == [1, 3, 3, 1]  # the first one before a launch


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt() -> None:
    generator = Generator(FakeBackend(batch=2), chunk_rows=2)
    short = generator.add(Request(tokens=(1,)))
    generator.rounds()
    long = generator.add(Request(tokens=[2] * 8))
    for _ in range(3):
        (delta,) = generator.rounds()
        assert (delta.sequence, len(delta.tokens)) == (short, 1)
    assert {one.sequence for one in generator.rounds()} == {short, long}


def test_prefill_reads_a_prompt_at_once() -> None:
    backend = FakeBackend(batch=2)
    generator = Generator(backend, chunk_rows=2)
    delta = generator.prefill(generator.add(Request(tokens=PROMPT, max_tokens=3)))
    assert delta.tokens == greedy(PROMPT, 1)
    assert backend.launches == []


# Launches.


def test_a_launch_has_no_more_rounds_than_asked_for_or_needed() -> None:
    backend = FakeBackend(rounds=8)
    generator = Generator(backend)
    generator.prefill(generator.add(Request(tokens=PROMPT, max_tokens=8)))
    generator.rounds(3)
    generator.rounds()
    assert backend.launches == [3, 4]


def test_a_launch_never_goes_beyond_the_context() -> None:
    """The backend asserts it: a sequence near the end has fewer rounds than another."""
    backend = FakeBackend(batch=2, context=24, rounds=8)
    requests = [Request(tokens=(4,)), Request(tokens=[3] * 20)]
    outputs = generate(Generator(backend, chunk_rows=24), requests)
    assert [len(one.tokens) for one in outputs] == [23, 4]
    assert max(backend.launches) == 8


def test_a_launch_ends_at_a_stop_id() -> None:
    expected = greedy(PROMPT, 4)
    backend = FakeBackend(rounds=8)
    generator = Generator(backend, stop_ids={expected[3]})
    assert generator.generate(Request(tokens=PROMPT)).tokens == expected
    assert backend.launches == [3]


def test_a_stop_id_of_one_sequence_does_not_stop_another() -> None:
    """Each has its own in a launch; the other goes on in the same launch."""
    expected = greedy(PROMPT, 12)
    other = (9, 9)
    stop = expected[4]
    assert stop not in greedy(other, 12)
    backend = FakeBackend(batch=2, rounds=8)
    requests = [
        Request(tokens=other, stop_ids=frozenset({stop}), max_tokens=12),
        Request(tokens=PROMPT, max_tokens=12),
    ]
    outputs = generate(Generator(backend), requests)
    assert [one.tokens for one in outputs] == [greedy(other, 12), expected]


# Independence.

samplings = strategies.builds(
    SamplingParams,
    temperature=strategies.sampled_from([0.0, 0.0, 1.0]),
    top_p=strategies.sampled_from([1.0, 0.9]),
    frequency_penalty=strategies.sampled_from([0.0, 0.5]),
    seed=strategies.integers(0, 3),
    alternatives=strategies.sampled_from([None, None, 1]),
)
requests_ = strategies.builds(
    Request,
    tokens=strategies.lists(strategies.integers(0, 2), min_size=1, max_size=20),
    sampling=samplings,
    max_tokens=strategies.integers(1, 12),
    stop_ids=strategies.frozensets(strategies.integers(0, VOCAB - 1), max_size=40),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=strategies.lists(requests_, min_size=1, max_size=6),
    batch=strategies.integers(1, 3),
    rounds=strategies.integers(1, 4),
    room=strategies.sampled_from([None, 0, 100, 10_000]),
)
def test_an_output_depends_on_its_request_alone(
    requests: list[Request], batch: int, rounds: int, room: int | None
) -> None:
    """Not on its neighbours, the slots, the rounds of a launch, or what the cache has kept."""
    cache_ = PrefixCache(rows=4, max_bytes=room) if room is not None else None
    generator = Generator(
        FakeBackend(batch=batch, rounds=rounds), prefix_cache=cache_, chunk_rows=4
    )
    together = generate(generator, requests)
    for request, output in zip(requests, together, strict=True):
        alone = Generator(FakeBackend(), chunk_rows=4).generate(request)
        assert output.tokens == alone.tokens
        assert output.logprobs == alone.logprobs
        assert (output.finish.reason, output.finish.stop) == (
            alone.finish.reason,
            alone.finish.stop,
        )
    assert generator.free_slots == batch


def test_the_prefix_cache_saves_prefill() -> None:
    backend = FakeBackend()
    generator = Generator(backend, prefix_cache=PrefixCache(rows=4, max_bytes=10_000))
    shared = list(range(10))
    first = generator.generate(Request(tokens=[*shared, 20], max_tokens=2))
    assert (backend.fed, first.finish.statistics.cached_tokens) == (11, 0)
    second = generator.generate(Request(tokens=[*shared, 30, 31], max_tokens=2))
    assert (backend.fed, second.finish.statistics.cached_tokens) == (11 + 4, 8)
    assert second.tokens == greedy([*shared, 30, 31], 2)


def test_statistics() -> None:
    ticks = iter(range(100))
    generator = Generator(FakeBackend(rounds=4), clock=lambda: float(next(ticks)))
    seen = generator.generate(Request(tokens=PROMPT, max_tokens=8)).finish.statistics
    assert (seen.prompt_tokens, seen.output_tokens, seen.rounds, seen.launches) == (3, 8, 7, 2)
    assert (seen.prefill_seconds, seen.seconds) == (1.0, 2.0)
    assert seen.tokens_per_second == 7.0
