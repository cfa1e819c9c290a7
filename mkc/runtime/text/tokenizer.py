"""Text to token ids and back, whatever file the vocabulary comes from."""

from __future__ import annotations

from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from re import compile as compile_pattern
from re import escape

WHITE_SPACE = compile_pattern(r"\s*")


@dataclass(frozen=True, kw_only=True)
class SpecialToken:
    """A token that is markup, not text: it is found only where markup is allowed.

    Attributes:
      text: how templates write it.
      id: its only id.
      hidden: it is left out of shown text, as turn markers are; markers of thoughts and tool calls
        are shown, because parsers of the output look for them.
      strips_left, strips_right: white space next to it belongs to it.
    """

    text: str
    id: int
    hidden: bool = True
    strips_left: bool = False
    strips_right: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What a tokenizer knows besides its vocabulary.

    Attributes:
      specials: the markup tokens.
      vocab_size: one more than the largest id that may occur, padding of the model included.
      tokens: how many ids have a token.
      holes: ids below the largest of them that have none, ascending.
      prefix_ids: ids in front of a prompt that no chat template has rendered.
      stop_ids: ids that end a generation.
      names: roles of special tokens (`bos_token`, `eos_token`, ...) to their text.
    """

    specials: tuple[SpecialToken, ...]
    vocab_size: int
    tokens: int
    holes: tuple[int, ...] = ()
    prefix_ids: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)


class Tokenizer(ABC):
    """A byte-level vocabulary with special tokens.

    Special tokens are separated from text here, once for all kinds of vocabulary: the text between
    them is encoded piece by piece, and a subclass encodes a piece without knowing any of them.

    Attributes:
      vocab_size: one more than the largest id, padding of the model included.
      tokens: how many ids have a token.
      holes: ids below the largest of them that have none, ascending.
      special_tokens: text of each special token to its id, sorted by id.
      special_ids: their ids.
      hidden_ids: those that are left out of shown text.
      stop_ids: ids that end a generation.
      prefix_ids: ids in front of a prompt that no chat template has rendered.
      names: roles of special tokens (`bos_token`, ...) to their text, for templates.
    """

    def __init__(self, facts: TokenizerFacts) -> None:
        specials = sorted(facts.specials, key=lambda one: one.id)
        self.vocab_size = facts.vocab_size
        self.tokens = facts.tokens
        self.holes = facts.holes
        self.special_tokens = {one.text: one.id for one in specials}
        self.special_ids = frozenset(one.id for one in specials)
        self.hidden_ids = frozenset(one.id for one in specials if one.hidden)
        self.stop_ids = facts.stop_ids
        self.prefix_ids = facts.prefix_ids
        self.names = dict(sorted(facts.names.items()))
        self._specials = {one.text: one for one in specials}
        self._known_bytes = {one.id: one.text.encode() for one in specials}  # and of ids seen
        longest_first = sorted(self._specials, key=lambda text: (-len(text), text))
        self._markup = compile_pattern("|".join(escape(text) for text in longest_first) or r"(?!)")

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of text that is nothing but text; `text` has no lone surrogates."""

    @abstractmethod
    def _text_token_bytes(self, token: int) -> bytes | None:
        """Bytes of an id of the vocabulary, None for an id that has none."""

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """The ids of `text`.

        Args:
          text: any string; a lone surrogate counts as U+FFFD.
          allow_special: whether the text of a special token becomes that token. False is for text
            that a user wrote: what looks like markup in it stays text.
        """
        if not allow_special:
            return self._encode_text(_without_surrogates(text)) if text else []
        return self.encode_guarded(text, guard="")

    def encode_guarded(self, text: str, *, guard: str) -> list[int]:
        """The ids of text with markup, in which some special tokens are made harmless.

        Args:
          text: text in which `guard` interrupts whatever must not become a special token.
          guard: the interruption, which is no part of the text; empty when there is none.
        """
        ids: list[int] = []
        for piece in self._pieces(_without_surrogates(text)):
            if isinstance(piece, SpecialToken):
                ids.append(piece.id)
                continue
            plain = piece.replace(guard, "") if guard else piece
            if plain:
                ids.extend(self._encode_text(plain))
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id: UTF-8, perhaps of a part of a character.

        Ids that the vocabulary leaves free, such as the padding of the model's embedding, have no
        bytes.
        """
        assert 0 <= token < self.vocab_size, f"id {token} is not below {self.vocab_size}"
        known = self._known_bytes.get(token)
        if known is None:
            known = self._known_bytes[token] = self._text_token_bytes(token) or b""
        return known

    def decode(self, ids: Sequence[int], *, show_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        hidden = frozenset[int]() if show_special else self.hidden_ids
        raw = b"".join(self.token_bytes(one) for one in ids if one not in hidden)
        return raw.decode("utf-8", "replace")

    def _pieces(self, text: str) -> Iterator[SpecialToken | str]:
        """The text cut at its special tokens, the longest one where several begin."""
        begin = 0
        for match in self._markup.finditer(text):
            if match.start() < begin:
                continue
            special = self._specials[match.group()]
            before = text[begin : match.start()]
            yield before.rstrip() if special.strips_left else before
            yield special
            begin = match.end()
            if special.strips_right:
                space = WHITE_SPACE.match(text, begin)
                begin = space.end() if space is not None else begin
        yield text[begin:]


def _without_surrogates(text: str) -> str:
    """`text` with pairs of surrogates joined, and lone ones replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
