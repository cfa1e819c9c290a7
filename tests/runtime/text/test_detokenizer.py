"""Ids to text as they come: every division gives the same text, in linear time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.runtime.text import Detokenizer
from mkc.runtime.text import Tokenizer
from tests.runtime.text.splits import CUTS
from tests.runtime.text.splits import divided
from tests.runtime.text.splits import singles

REPLACEMENT = "\ufffd"


def streamed(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join(detokenizer.feed(piece) for piece in pieces) + detokenizer.flush()


@given(text=st.text(max_size=40), cuts=CUTS)
def test_any_division_of_any_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text, allow_special=False)
    assert streamed(Detokenizer(tokenizer), divided(ids, cuts)) == text


@given(ids=st.lists(st.integers(0, 266), max_size=40), cuts=CUTS)
def test_any_ids_even_if_they_are_no_text(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    text = tokenizer.decode(ids)
    assert streamed(Detokenizer(tokenizer), divided(ids, cuts)) == text
    assert streamed(Detokenizer(tokenizer), singles(ids)) == text


@pytest.mark.parametrize("text", ["ü", "早", "🙂", "안"])
def test_a_part_of_a_character_is_held_back(ranked: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(ranked)
    *first, last = list(text.encode())  # in this vocabulary, the id of a byte is the byte
    assert [detokenizer.feed([token]) for token in first] == [""] * len(first)
    assert detokenizer.feed([last]) == text
    assert detokenizer.flush() == ""


def test_complete_text_is_never_held_back(ranked: Tokenizer) -> None:
    detokenizer = Detokenizer(ranked)
    assert [detokenizer.feed([token]) for token in b"a<\n "] == ["a", "<", "\n", " "]


def test_what_is_never_completed_is_replaced(ranked: Tokenizer) -> None:
    detokenizer = Detokenizer(ranked)
    assert detokenizer.feed(list("早".encode()[:2])) == ""
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.feed(list(b"ok")) == "ok"


def test_special_tokens_are_hidden_unless_asked_for(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|end|></think>", allow_special=True)
    assert Detokenizer(byte_level).feed(ids) == "the</think>"
    assert Detokenizer(byte_level, show_special=True).feed(ids) == "the<|end|></think>"


@given(text=st.text(min_size=1, max_size=12), cut=st.integers(0, 50))
def test_a_prompt_that_ends_inside_a_character(ranked: Tokenizer, text: str, cut: int) -> None:
    """The character is shown whole, and nothing else of the prompt."""
    raw = text.encode()
    cut = min(cut, len(raw))
    prompt, output = list(raw[:cut]), list(raw[cut:])
    complete = raw[:cut].decode(errors="ignore")
    shown = streamed(Detokenizer(ranked, prompt=prompt), singles(output))
    expected = text[len(complete) :]
    assert shown == (expected if output else REPLACEMENT * bool(expected))


def test_a_special_token_ends_what_a_prompt_can_leave_open(ranked: Tokenizer) -> None:
    prompt = [*"早".encode()[:2], ranked.special_tokens["<|sep|>"]]
    assert Detokenizer(ranked, prompt=prompt).feed(list(b"ok")) == "ok"


def test_the_work_is_the_bytes(ranked: Tokenizer) -> None:
    """No byte is decoded twice, however long the stream is and wherever tokens end."""
    ids = ranked.encode("早上好🙂 the cat\n" * 500, allow_special=False)
    detokenizer = Detokenizer(ranked)
    for token in ids:
        detokenizer.feed([token])
    assert detokenizer.bytes_decoded == sum(len(ranked.token_bytes(token)) for token in ids)
