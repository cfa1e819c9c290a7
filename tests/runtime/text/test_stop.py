"""Stop strings against an implementation that looks at the whole text at every character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.runtime.text import StopStrings
from mkc.runtime.text.matcher import Matcher
from tests.runtime.text.splits import CUTS
from tests.runtime.text.splits import divided

# Few letters, so that strings overlap and repeat.
TEXT = st.text("ab早", max_size=30)
STOPS = st.lists(st.text("ab早", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Shown text and stop string, by trying every end."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            longest = max(completed, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


def streamed(text: str, cuts: list[int], stops: StopStrings) -> tuple[str, str | None]:
    results = [stops.feed(piece) for piece in divided(text, cuts)] + [stops.flush()]
    return "".join(one.text for one in results), results[-1].matched


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_any_division_shows_what_the_reference_shows(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    assert streamed(text, cuts, StopStrings(stops)) == reference(text, stops)


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_the_stop_string_itself_can_be_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    shown = streamed(text, cuts, StopStrings(stops, include=True))
    assert shown == reference(text, stops, include=True)


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopStrings(stops)
    seen = shown = ""
    for piece in divided(text, cuts):
        result = matcher.feed(piece)
        seen += piece
        shown += result.text
        if result.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        longest = max(
            (size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])),
            default=0,
        )
        assert len(held) == longest


def test_a_stop_string_across_deltas_is_not_shown() -> None:
    stops = StopStrings(["END"])
    assert [stops.feed(delta).text for delta in ("one E", "N", "D two")] == ["one ", "", ""]


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none() -> None:
    stops = StopStrings(["END"])
    assert [stops.feed(delta).text for delta in ("E", "N", "E")] == ["", "", "EN"]
    assert stops.flush().text == "E"


def test_nothing_is_shown_after_the_stop() -> None:
    stops = StopStrings(["."])
    assert stops.feed("a.b").text == "a"
    assert stops.feed("c").text == ""
    assert stops.flush().text == ""


def test_the_first_to_be_complete_counts() -> None:
    result = StopStrings(["abcd", "bc"]).feed("xabcd")
    assert (result.text, result.matched) == ("xa", "bc")


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [("aaab", "aab", "a"), ("ababac", "abac", "ab"), ("aabaabaaa", "aabaaa", "aab")],
)
def test_a_stop_string_may_begin_inside_a_failed_one(text: str, stop: str, shown: str) -> None:
    assert StopStrings([stop]).feed(text).text == shown


def test_the_work_is_linear() -> None:
    """The worst text for a naive search: nearly a stop string, at every place."""
    matcher = Matcher(["a" * 500 + "b"])
    length = 20_000
    for _ in range(length):
        matcher.feed("a")
    assert matcher.work <= 2 * length
