"""Graph texts that do not parse: line, column, what was expected."""

from __future__ import annotations

import pytest

from mkc.errors import TextError
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from tests.errors.expect import refused
from tests.ir.small_graph import small_graph


def edited(old: str, new: str) -> str:
    text = print_graph(small_graph())
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


def place(text: str, word: str) -> str:
    """`line:column` of the first occurrence of `word`, counted from 1."""
    before = text[: text.index(word)]
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


@pytest.mark.parametrize(
    ("old", "new", "at", "expected"),
    [
        ("embed(", "embedd(", "embedd", "a known operation (accept, all_"),
        ("bf16[64", "f16[64", "f16", "an element type (bf16, f32, i32, e2m1x2, e8m0)"),
        ("kv_cache @keys", "cache @keys", "cache @keys", "a kind of state (kv_cache, recurrent"),
        ("rows = 2", "rows = two", "two", "an integer"),
        ("rows = 2", "rows = 2.5", "2.5", "an integer"),
        ("weight = plain", "weight = heavy", "heavy", "one of plain, zero_centred"),
        ("eps = 1e-06", "epsilon = 1e-06", "epsilon", "an attribute of RmsNorm (eps,"),
        ("eps = 1e-06, ", "eps = 1e-06, eps = 1, ", "eps = 1,", "an attribute of RmsNorm (round"),
        ("(%tokens, @table)", "(%tokens @table)", "@table)", "',' or ')'"),
        ("(%tokens, @table)", "(%tokens, table)", "table)", "an operand (%value or @parameter)"),
        ("repeat blocks x 2", "repeat blocks 2", "2 carry", "'x'"),
        ('loc("small.py":1)', 'loc("small.py")', ")\n  %h.last", "':'"),
        ("yield %h.added", "yield h.added", "h.added\n", "a value (%name)"),
        ("logits = %logits", "logits %logits", "%logits\n", "'='"),
        ('"small" {', "small {", "small {", "a string"),
        ('graph "small"', 'model "small"', "model", "'graph'"),
        ("%next: i32", "! %next: i32", "!", "a word of the text form"),
    ],
)
def test_a_wrong_word(old: str, new: str, at: str, expected: str) -> None:
    text = edited(old, new)
    start = text.index(new)
    position = place(text, text[text.index(at, start) :])
    with refused(TextError, f"my.mkc:{position}: expected {expected}", "docs/graph-ir.md"):
        parse(text, file="my.mkc")


def test_missing_attribute() -> None:
    text = edited("eps = 1e-06, ", "")
    with refused(TextError, "RmsNorm with an attribute 'eps'"):
        parse(text)


def test_carries_and_yields_that_do_not_match() -> None:
    text = edited("yield %h.added", "yield %h.added, %mixed")
    with refused(TextError, "as many results (1) as carries (1) and yields (2)"):
        parse(text)


def test_text_that_ends_early() -> None:
    text = print_graph(small_graph()).rstrip().removesuffix("}")
    with refused(TextError, "an operation, 'output' or '}'", "got end of text"):
        parse(text)


def test_text_behind_the_end() -> None:
    with refused(TextError, "the end of the text", "got 'graph'"):
        parse(print_graph(small_graph()) + "graph ")


def test_string_with_an_unknown_escape() -> None:
    with refused(TextError, "1:7", "a string with JSON escapes"):
        parse('graph "\\q" {')
