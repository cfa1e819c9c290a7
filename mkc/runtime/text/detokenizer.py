"""Token ids to text, as they come."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from mkc.runtime.text.tokenizer import Tokenizer

# The longest UTF-8 sequence that can still be incomplete has three bytes.
MAX_INCOMPLETE = 3


class Detokenizer:
    """Turns ids into text one id at a time, each in constant time.

    A token may end inside a character: its bytes are held back until the character is complete.
    The deltas, joined, are what `Tokenizer.decode` gives for all ids at once; bytes that can never
    become a character turn into U+FFFD.

    Attributes:
      bytes_decoded: bytes handed to the decoder so far, which is all the work there is.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt: Sequence[int] = (), show_special: bool = False
    ) -> None:
        """
        Args:
          tokenizer: says the bytes of each id.
          prompt: ids before the stream. When they end inside a character, the stream begins with
            that character whole; no other text of the prompt is shown.
          show_special: whether special tokens appear by name, or not at all.
        """
        self._tokenizer = tokenizer
        self._hidden = frozenset[int]() if show_special else tokenizer.hidden_ids
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.bytes_decoded = 0
        self._decoder.decode(self._incomplete_end(prompt))

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became complete with `ids`."""
        raw = b"".join(self._tokenizer.token_bytes(one) for one in ids if one not in self._hidden)
        self.bytes_decoded += len(raw)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The end of the stream: U+FFFD for a character that was never completed."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def _incomplete_end(self, prompt: Sequence[int]) -> bytes:
        """The bytes at the end of the prompt that begin a character and do not end it."""
        end = b""
        for one in reversed(prompt):
            if len(end) >= MAX_INCOMPLETE:
                break
            end = self._tokenizer.token_bytes(one)[-MAX_INCOMPLETE:] + end
        end = end[-MAX_INCOMPLETE:]
        for start in range(len(end)):
            decoder = getincrementaldecoder("utf-8")("strict")
            try:
                shown = decoder.decode(end[start:])
            except UnicodeDecodeError:
                continue
            if not shown:
                return end[start:]
        return b""
