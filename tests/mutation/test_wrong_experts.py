"""Mistakes with experts in the functions of the kernel: four ranks that share experts differ from
the sum of all experts.

Copies happen at once, so that what comes too early overwrites what is still needed.

`docs/verifier.md` lists the kinds.
"""

from __future__ import annotations

import pytest

from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.test_support_experts import check_shared_experts
from tests.mutation.wrong import Wrong
from tests.mutation.wrong import names
from tests.mutation.wrong import on_the_page
from tests.mutation.wrong import rewritten
from tests.mutation.wrong import table

MODULE = "mkc.codegen_pallas.support.experts"
HEADING = "mistake with experts"
# In front of the refill of the slot that it reads.
SECOND_PRODUCT = "        add(jnp.maximum(index - 1, 0), before, inner, index > 0)\n"
END = "        return wrapped_next(slot, store.slots), slot, following"


def wrong(story: str, function: str, *edits: tuple[str, str]) -> Wrong:
    """Lines of a function in another form."""
    return Wrong(story=story, name=function, module=MODULE, instead=rewritten(*edits))


MISTAKES = {
    "slot": wrong(
        "an expert's weights go to another slot than the one that is read",
        "_loads",
        ("ring.at[slot], store", "ring.at[jnp.where(slot == 0, 1, 0)], store"),
    ),
    "not_chosen": wrong(
        "an expert is loaded that no row has chosen",
        "_start",
        ("store.chosen[CHOSEN, index]", "(store.chosen[CHOSEN, index] + 1) % store.local"),
    ),
    "order": wrong(
        "experts are loaded from the last one on, and computed from the first one on",
        "_start",
        ("store.chosen[CHOSEN, index]", "store.chosen[CHOSEN, store.chosen[COUNT, 0] - 1 - index]"),
    ),
    "layer": wrong(
        "experts of the layer before are loaded",
        "_start",
        ("layer * store.local", "(layer - 1) * store.local"),
    ),
    "other_rank": wrong(
        "a rank takes its experts for those of another one",
        "expert_mlp",
        (
            "number = first + store",
            "number = first + store.local - 2 * (first % (2 * store.local)) + store",
        ),
    ),
    "weight": wrong(
        "an expert's output is given the weight of the next one",
        "expert_mlp",
        ("== number", "== number + 1"),
    ),
    "refill": wrong(
        "a slot is refilled before its expert has been computed",
        "expert_mlp",
        (SECOND_PRODUCT, ""),
        (END, SECOND_PRODUCT + END),
    ),
}
QUICK = ("other_rank", "refill")


@pytest.mark.parametrize("name", names(MISTAKES, QUICK))
def test_ranks_with_a_mistake_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name].make(monkeypatch)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_shared_experts(Mode.EAGER)


def test_without_a_mistake_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function in its own words, compiled as the spoiled ones are."""
    wrong("", "expert_mlp", ("== number", "== number")).make(monkeypatch)
    check_shared_experts(Mode.EAGER)


def test_the_list_on_the_page_is_this_one() -> None:
    assert on_the_page("experts") == table(HEADING, MISTAKES)
