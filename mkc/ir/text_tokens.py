"""Words of the text form, see `mkc.ir.text`."""

from __future__ import annotations

from dataclasses import dataclass
from re import VERBOSE
from re import compile as compile_pattern

from mkc.errors import TextError

IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_.]*"
# `{index}` and `#1` occur in the keys of parameters.
SIGIL_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.]|\{index\}|\#[0-9]+)*"
STRING = r'"(?:[^"\\]|\\.)*"'

TOKEN = compile_pattern(
    rf"""(?P<blank>[ \t\n]+|\#[^\n]*)
    |(?P<string>{STRING})
    |(?P<value>%(?:{SIGIL_NAME}|{STRING}))
    |(?P<key>@(?:{SIGIL_NAME}|{STRING}))
    |(?P<part>\d+[xh]\d+)
    |(?P<number>-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf(?![A-Za-z0-9_.])))
    |(?P<name>{IDENTIFIER})
    |(?P<mark>\.\.|[{{}}()\[\],:=+])""",
    flags=VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A word of the text; `kind` is a group of `TOKEN`, or `end`."""

    kind: str
    text: str
    line: int
    column: int


def tokenize(text: str, file: str) -> list[Token]:
    """All words of `text` but blanks and comments, and an `end` token.

    Raises:
      TextError: a character that starts no word.
    """
    tokens: list[Token] = []
    position, line, start = 0, 1, 0
    while position < len(text):
        match = TOKEN.match(text, position)
        column = position - start + 1
        if match is None:
            raise TextError(
                file=file,
                line=line,
                column=column,
                expected="a word of the text form",
                got=repr(text[position]),
            )
        kind, word = str(match.lastgroup), match.group()
        if kind != "blank":
            tokens.append(Token(kind=kind, text=word, line=line, column=column))
        newlines = word.count("\n")
        if newlines:
            line += newlines
            start = position + word.rindex("\n") + 1
        position = match.end()
    tokens.append(Token(kind="end", text="end of text", line=line, column=position - start + 1))
    return tokens
