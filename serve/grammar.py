"""Grammars of outputs, in the language of `llguidance`, and what follows an output through one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import lru_cache
from json import dumps
from json import loads
from math import ceil
from re import escape
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance import LLParserLimits
from llguidance import LLTokenizer
from llguidance import grammar_from

from mkc.runtime.shards import Array

type Part = Mapping[str, Any]  # a grammar of its own: its Lark text, or a JSON schema

SPACES = "[ ]?"  # between the parts of JSON; more would let a model write spaces without end
WORD_BITS = 32
# For expressions of a grammar, a quarter of what `llguidance` takes by itself: with that, one such
# as (a{1000}){1000} is found to be too large only after a second, in which no sequence goes on.
LEXER_FUEL = 250_000
TEXT = r"(.|\n)"  # any character, in a regular expression
ANY_JSON_OBJECT: Mapping[str, Any] = {"type": "object"}


def schema_part(schema: Mapping[str, Any], *, lenient: bool = False) -> Part:
    """JSON of a schema.

    Args:
      lenient: keywords that are not known are ignored; else `problem` tells of them.
    """
    options = {"whitespace_pattern": SPACES, "lenient": lenient}
    return {"json_schema": {**schema, "x-guidance": options}}


def regex_part(pattern: str) -> Part:
    """Text that a regular expression matches as a whole."""
    (whole,) = loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return {"lark_grammar": whole["lark_grammar"]}


def grammar_part(text: str) -> Part:
    """Text of a grammar in the notation of Lark, or in that of GBNF. Raises `ValueError`."""
    return {"lark_grammar": grammar_from("grammar", text)}


def choice_part(texts: Sequence[str]) -> Part:
    """One of some texts."""
    return {"lark_grammar": "start: " + " | ".join(map(literal, texts))}


def literal(text: str) -> str:
    """A text that stands for itself in a rule."""
    return dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A text that stands for itself in a regular expression."""
    return escape(text).replace("/", r"\/")


class Rules:
    """A grammar whose rules refer to parts."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._parts: list[Part] = []

    def add(self, name: str, expression: str) -> str:
        """Adds a rule; returns its name. A name that ends with `[lazy]` ends as early as it can."""
        self._rules[name] = expression
        return name.partition("[")[0]

    def part(self, part: Part) -> str:
        """Adds a part; returns how rules refer to it."""
        self._parts.append({"name": f"part{len(self._parts)}", **part})
        return f"@{self._parts[-1]['name']}"

    def text(self, start: str) -> str:
        """The whole grammar, of outputs that fit the expression `start`."""
        rules = {"start": start, **self._rules}
        lark = "\n".join(f"{name}: {expression}" for name, expression in rules.items())
        return dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *self._parts]})


def problem(part: Part, words: LLTokenizer) -> str:
    """What is wrong with a part; empty when nothing is."""
    text = dumps({"grammars": [part]})
    found, messages = LLMatcher.validate_grammar_with_warnings(text, words, limits=_limits())
    return messages[0].partition("\n")[0][:200] if found else ""


class GrammarConstraint:
    """Allows the tokens that continue an output as its grammar says."""

    def __init__(self, matcher: LLMatcher, *, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._words = ceil(vocab / WORD_BITS)

    def mask(self) -> Array:
        """See `TokenConstraint`. A grammar that has become too complex allows nothing."""
        bits = self._matcher.compute_bitmask()  # with one bit more than there are tokens
        words = np.frombuffer(bits, np.uint32)[: self._words]
        return np.zeros_like(words) if self._matcher.is_error() else words

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)

    def copy(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), vocab=self._vocab)


def constraint(grammar: str, words: LLTokenizer) -> GrammarConstraint:
    """A constraint at the beginning of an output. Raises `ValueError` for a wrong grammar."""
    return GrammarConstraint(_compiled(grammar, words).deep_copy(), vocab=words.vocab_size)


@lru_cache(maxsize=64)
def _compiled(grammar: str, words: LLTokenizer) -> LLMatcher:
    found = LLMatcher(words, grammar, log_level=0, limits=_limits())
    begins = any(found.compute_bitmask())  # also done here because the first time takes longest
    if found.is_error():
        raise ValueError(found.get_error().partition("\n")[0][:200])
    if not begins:
        raise ValueError("no text is of this form")
    return found


def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        verbose_errors=False,  # they hold what the output has been so far
    )
