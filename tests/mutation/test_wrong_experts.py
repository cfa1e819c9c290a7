"""Mistakes with experts in the functions of the kernel: four ranks that share experts differ from
the sum of all experts.

Copies happen at once, so that what comes too early overwrites what is still needed.

`docs/verifier.md` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mkc.codegen_pallas import support
from mkc.codegen_pallas.support import experts
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.test_support_experts import check_shared_experts

PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"
BEGIN, END = "<!-- experts -->\n", "<!-- end of experts -->"


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A mistake: a line of a function of `support.experts` in another form."""

    story: str
    function: str
    lines: str
    instead: str


MISTAKES = {
    "slot": Wrong(
        story="an expert's weights go to another slot than the one that is read",
        function="_loads",
        lines="ring.at[slot], store",
        instead="ring.at[jnp.where(slot == 0, 1, 0)], store",
    ),
    "not_chosen": Wrong(
        story="an expert is loaded that no row has chosen",
        function="_start",
        lines="store.chosen[CHOSEN, index]",
        instead="(store.chosen[CHOSEN, index] + 1) % store.local",
    ),
    "order": Wrong(
        story="experts are loaded from the last one on, and computed from the first one on",
        function="_start",
        lines="store.chosen[CHOSEN, index]",
        instead="store.chosen[CHOSEN, store.chosen[COUNT, 0] - 1 - index]",
    ),
    "layer": Wrong(
        story="experts of the layer before are loaded",
        function="_start",
        lines="layer * store.local",
        instead="(layer - 1) * store.local",
    ),
    "other_rank": Wrong(
        story="a rank takes its experts for those of another one",
        function="expert_mlp",
        lines="number = first + store",
        instead="number = first + store.local - 2 * (first % (2 * store.local)) + store",
    ),
    "weight": Wrong(
        story="an expert's output is given the weight of the next one",
        function="expert_mlp",
        lines="== number",
        instead="== number + 1",
    ),
    "refill": Wrong(
        story="a slot is refilled before its expert has been computed",
        function="expert_mlp",
        lines="        both = product(",
        instead="        _start(store, layer, index + store.slots, slot)\n        both = product(",
    ),
}
QUICK = ("other_rank", "refill")
# One refill, moved: the one at its place is left out.
AT_ITS_PLACE = "        _start(store, layer, index + store.slots, slot)\n        return"


def spoiled(wrong: Wrong) -> Callable[..., Any]:
    """The function with the mistake in it."""
    text = dedent(getsource(getattr(experts, wrong.function)))
    assert text.count(wrong.lines) == 1
    edited = text.replace(AT_ITS_PLACE, "        return") if "_start" in wrong.instead else text
    names = dict(vars(experts))
    exec(compile(edited.replace(wrong.lines, wrong.instead), wrong.function, "exec"), names)
    return names[wrong.function]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in MISTAKES],
)
def test_ranks_with_a_mistake_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = MISTAKES[name]
    function = spoiled(wrong)
    monkeypatch.setattr(experts, wrong.function, function)
    if hasattr(support, wrong.function):
        monkeypatch.setattr(support, wrong.function, function)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_shared_experts(Mode.EAGER)


def test_without_a_mistake_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function in its own words, compiled as the spoiled ones are."""
    sound = Wrong(story="", function="expert_mlp", lines="== number", instead="== number")
    monkeypatch.setattr(support, sound.function, spoiled(sound))
    check_shared_experts(Mode.EAGER)


def table() -> str:
    lines = ["| mistake with experts |", "|---|"]
    lines += [f"| {one.story} |" for one in MISTAKES.values()]
    return "\n".join(lines) + "\n"


def test_the_list_on_the_page_is_this_one() -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert section == table()
