"""Keeps text of users from becoming markup, whatever a template does with it.

A template joins text of users and markup into one string, in which they look alike. So before
rendering, a *guard* is put into the text wherever it could take part in a special token: one
character that occurs nowhere in the request or the template, and that therefore nobody can forge.
After rendering, a special token with a guard inside is not found; guards are removed from the text
between the special tokens before it is encoded. A text without anything suspicious is unchanged
and gets exactly the ids that the rendered string as a whole would get.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from json import dumps
from re import compile as compile_pattern
from re import escape
from typing import Any

from mkc.errors import ChatMessageError

# Supplementary private use area A: characters that no standard text contains, so that the first
# one nearly always serves.
PRIVATE = range(0xF0000, 0xFFFFE)
PRIVATE_PATTERN = compile_pattern("[\U000f0000-\U000ffffd]")


class Guard:
    """Guards the text of one request.

    Attributes:
      mark: the guard character.
    """

    def __init__(
        self, specials: Collection[str], *, template_words: Collection[str], texts: object
    ) -> None:
        """
        Args:
          specials: texts of the special tokens.
          template_words: words that the template compares values with or looks up; they are left
            alone, except for markup in them.
          texts: everything that goes into the rendering, in order to find a free character.
        """
        self.mark = _free_character(list(_strings(texts)))
        self._specials = tuple(sorted(specials))
        self._words = frozenset(template_words)
        first = sorted({text[0] for text in specials})
        self._first = compile_pattern(f"[{''.join(map(escape, first))}]" if first else r"(?!)")

    def protect(self, value: Any) -> Any:
        """A copy of a JSON value with guards in its strings, keys included."""
        if isinstance(value, str):
            return self._protect_text(value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def remove(self, text: str) -> str:
        """The text without guards."""
        return text.replace(self.mark, "")

    def _protect_text(self, text: str) -> str:
        guarded = self._first.sub(lambda match: match.group() + self.mark, text)
        if text not in self._words and self._could_complete(text):
            begin = len(guarded) - len(guarded.lstrip()) + 1
            guarded = guarded[:begin] + self.mark + guarded[begin:]
        return guarded

    def _could_complete(self, text: str) -> bool:
        """Whether a template that writes the beginning of a special token could end it with this.

        That is, the text begins with the end of a special token (`think>` after `<`), or is
        a piece from the middle of one (`think` between `<` and `>`).
        """
        begin = text.lstrip()
        word = begin.rstrip()
        if not word:
            return False
        for special in self._specials:
            if word in special[1:]:
                return True
            if any(begin.startswith(special[cut:]) for cut in range(1, len(special))):
                return True
        return False


def _strings(value: object) -> Iterator[str]:
    """All strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _strings(item)


def _free_character(texts: list[str]) -> str:
    """A character that is in no text, neither plainly nor in the escaped form of JSON."""
    used = {found for text in texts for found in PRIVATE_PATTERN.findall(text)}
    for code in PRIVATE:
        character = chr(code)
        if character not in used and not any(json_form(character) in text for text in texts):
            return character
    raise ChatMessageError(
        where="messages",
        problem=f"the text uses all {len(PRIVATE)} characters from U+F0000 on",
        expected="text without these private characters",
    )


def json_form(character: str) -> str:
    """How JSON in ASCII writes a character."""
    return dumps(character)[1:-1]
