"""Vocabularies in `tokenizer.json`: byte-level BPE, run by the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache
from json import dumps
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BytePairEncoder

from mkc.errors import TokenizerFileError
from mkc.errors import UnsupportedTokenizerError
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.text.tokenizer import TokenizerFacts

type Json = Mapping[str, Any]


class ByteLevelTokenizer(Tokenizer):
    """A tokenizer whose text pieces go through a `tokenizers` pipeline without special tokens."""

    def __init__(self, description: Json, facts: TokenizerFacts, *, path: Path) -> None:
        """
        Args:
          description: contents of tokenizer.json, of a kind that `check_kind` accepts.
          facts: its special tokens and the rest.
          path: for messages.
        """
        super().__init__(facts)
        plain = without_specials(description, self.special_tokens)
        try:
            self._encoder = BytePairEncoder.from_str(dumps(plain))
        except Exception as error:  # the package raises nothing narrower
            raise TokenizerFileError(
                path=path, problem=f"cannot be read: {error}", expected="a tokenizer.json"
            ) from error

    def _encode_text(self, text: str) -> list[int]:
        # Other than `encode` this lets other threads run meanwhile, and notes no offsets.
        (encoded,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def _text_token_bytes(self, token: int) -> bytes | None:
        text = self._encoder.id_to_token(token)
        if text is None:
            return None
        table = byte_of_character()
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode()  # an added token that is text, such as a run of tabs


@cache
def byte_of_character() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def without_specials(description: Json, specials: Mapping[str, int]) -> dict[str, Any]:
    """The same vocabulary, in which the text of a special token is text.

    Leaving the special tokens out of `added_tokens` is enough for a search by merges; a vocabulary
    that takes whole words first must not find them among its words either.
    """
    model = dict(description["model"])
    made = {_merged(merge) for merge in model.get("merges", ())}
    words = {
        text: token
        for text, token in model["vocab"].items()
        if text not in specials or text in made or len(text) == 1
    }
    added = [one for one in description.get("added_tokens", ()) if one["content"] not in specials]
    # The package numbers added tokens anew, unless they are words: those keep their number.
    model["vocab"] = words | {one["content"]: one["id"] for one in added}
    return {
        **description,
        "added_tokens": added,
        "model": model,
        "padding": None,
        "post_processor": None,
        "truncation": None,
    }


def prefix_tokens(description: Json) -> tuple[str, ...]:
    """The tokens that the post-processor puts in front of a single text."""
    found: list[str] = []
    for step in _steps(description.get("post_processor"), "processors"):
        if step.get("type") != "TemplateProcessing":
            continue
        for part in step.get("single", ()):
            if "Sequence" in part:
                break
            found.append(part["SpecialToken"]["id"])
    return tuple(found)


def _merged(merge: str | Sequence[str]) -> str:
    """What a merge makes; it is written as `a b` or as a pair."""
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def check_kind(description: Json, path: Path) -> None:
    """Refuses what would not give the ids that the checkpoint was trained with.

    Raises:
      TokenizerFileError: it is no description of a tokenizer.
      UnsupportedTokenizerError: of another kind.
    """
    model = description.get("model")
    if not isinstance(model, Mapping) or "vocab" not in model:
        raise TokenizerFileError(
            path=path, problem="there is no model with a vocab", expected="a tokenizer.json"
        )
    kind = model.get("type")
    if kind != "BPE":
        raise UnsupportedTokenizerError(path=path, part="model.type", got=kind, supported="'BPE'")
    decoders = [one.get("type") for one in _steps(description.get("decoder"), "decoders")]
    if "ByteLevel" not in decoders:
        got = decoders[0] if len(decoders) == 1 else decoders
        raise UnsupportedTokenizerError(
            path=path, part="decoder", got=got, supported="byte-level BPE, decoder 'ByteLevel'"
        )
    for step in _steps(description.get("pre_tokenizer"), "pretokenizers"):
        if step.get("add_prefix_space"):
            raise UnsupportedTokenizerError(
                path=path, part="add_prefix_space", got=True, supported="false"
            )


def _steps(part: Json | None, key: str) -> Sequence[Json]:
    """The steps of a pipeline part, which is one step, a sequence, or nothing."""
    if part is None:
        return ()
    if part.get("type") == "Sequence":
        return tuple(part.get(key, ()))
    return (part,)
