"""The vocabulary of a model, as grammars need it."""

from __future__ import annotations

from functools import lru_cache

from llguidance import LLTokenizer
from llguidance import TokenizerWrapper

from mkc.errors import RequestFieldError
from mkc.runtime.text import Tokenizer


class _Words:
    """What `llguidance` asks of a tokenizer.

    Markers of thoughts and calls that are shown are text, as parsers of the output see them; hidden
    ones are no text, and are only where a grammar names their ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        known = min(vocab, tokenizer.vocab_size)
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(one) for one in range(known)]
        self.tokens += [b""] * (vocab - known)
        self.special_token_ids = sorted(tokenizer.hidden_ids | tokenizer.stop_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, allow_special=False)


@lru_cache(maxsize=4)
def vocabulary(tokenizer: Tokenizer, vocab: int) -> LLTokenizer:
    """The vocabulary; it takes about a second for a large one, once.

    Args:
      vocab: token ids of the model, at least those of the tokenizer that have bytes.

    Raises:
      RequestFieldError: no token ends an output, so none could be kept to a form.
    """
    if not tokenizer.stop_ids:
        raise RequestFieldError(
            field="response_format",
            problem="asks for a form, and this model has no token that ends an output",
            expected="free text",
        )
    words = TokenizerWrapper(_Words(tokenizer, vocab))
    return LLTokenizer(words, n_vocab=vocab, eos_token=sorted(tokenizer.stop_ids))
