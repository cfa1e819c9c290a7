"""What looks wrong in a checkpoint, and runs all the same."""

from __future__ import annotations

import pytest

from mkc.cli.doubts import doubts
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.text.tokenizer import TokenizerFacts


class Letters(Tokenizer):
    """Nothing but facts."""

    def _encode_text(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def _text_token_bytes(self, token: int) -> bytes | None:
        return bytes([token])


def tokenizer(*, vocab: int, tokens: int, holes: tuple[int, ...] = ()) -> Tokenizer:
    return Letters(TokenizerFacts(specials=(), vocab_size=vocab, tokens=tokens, holes=holes))


def test_tensors_that_are_not_finite() -> None:
    whole = tokenizer(vocab=100, tokens=100)
    assert list(doubts(whole, ["a.norm"])) == ["tensor 'a.norm' has a NaN or an infinity"]
    assert list(doubts(whole, [])) == []


@pytest.mark.parametrize("tokens", [248_077, 50_295 * 248_320 // 51_200, 9 * 24_832])
def test_padding_of_published_checkpoints_is_no_doubt(tokens: int) -> None:
    """Of 248,320 rows, as those of a 27B model, and in the proportions of others."""
    assert list(doubts(tokenizer(vocab=248_320, tokens=tokens), [])) == []


def test_a_tokenizer_of_a_smaller_model() -> None:
    (said,) = doubts(tokenizer(vocab=248_320, tokens=151_665), [])
    assert said.startswith("the tokenizer has 151665 tokens, the model 248320: is it")


def test_holes() -> None:
    holes = (5, 9, 10, 11)
    (said,) = doubts(tokenizer(vocab=100, tokens=96, holes=holes), [])
    assert said.startswith("4 ids between others have no token: 5, 9..11; should the model")
    many = tuple(range(1, 40, 2))
    (said,) = doubts(tokenizer(vocab=200, tokens=190, holes=many), [])
    assert "20 ids between others have no token: 1, 3, 5, 7, 9, 11, 13, 15, ...; " in said
