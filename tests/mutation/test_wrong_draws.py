"""Mistakes in the arithmetic of rounds that sample; see `test_wrong_rounds`.

What is drawn is compared with what the reference draws from the kernel's own logits.
`docs/verifier.md` lists the kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.runtime.finish_round import GREEDY
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.kernel import KernelSession
from tests.codegen_pallas.support_run import Mode
from tests.kernel.test_sampled_rounds import BATCH
from tests.kernel.test_sampled_rounds import FLAT
from tests.kernel.test_sampled_rounds import ROWS
from tests.kernel.test_sampled_rounds import WARM
from tests.kernel.test_sampled_rounds import begin
from tests.kernel.test_sampled_rounds import check_round
from tests.kernel.test_sampled_rounds import kernel
from tests.kernel.test_sampled_rounds import launch
from tests.kernel.test_sampled_rounds import proposed
from tests.kernel.test_sampled_rounds import session_of
from tests.kernel.test_sampled_rounds import with_likely_drafts
from tests.mutation.wrong import SUPPORT
from tests.mutation.wrong import Function
from tests.mutation.wrong import Wrong
from tests.mutation.wrong import changed
from tests.mutation.wrong import names
from tests.mutation.wrong import on_the_page
from tests.mutation.wrong import result
from tests.mutation.wrong import table

HEADING = "mistake in the arithmetic of rounds that sample"
ACCEPT = f"{SUPPORT}.sampled_accept"
OTHER = SequenceSampling(temperature=1.2, top_k=90, top_p=0.8, min_p=0.0, seed=(-3, 70))
FORCED = [3, 5]
SEEDS = 8  # so many pairs of draws, of which some show a mistake that changes a few only


def wrong(
    story: str, name: str, instead: Callable[[Function], Function], *, module: str = ACCEPT
) -> Wrong:
    return Wrong(story=story, name=name, module=module, instead=instead)


def with_runner(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The race of another runner."""
    return lambda race: lambda logits, runner, **sizes: race(logits, change(runner), **sizes)


def of_the_other(filters: Any) -> Any:
    """Rows of two sequences change places."""
    rolled = {
        one.name: jnp.roll(getattr(filters, one.name), ROWS, axis=0) for one in fields(filters)
    }
    return replace(filters, **rolled)


def next_place(scalars: Any, index: Any) -> Any:
    return scalars[index] + 1


def without_rows(function: Function) -> Function:
    return lambda memory, rows, **sizes: function(memory, (), **sizes)


def still_forced(function: Function) -> Function:
    """The end of a round that leaves `s_forced` as it was."""

    def wrong(memory: Any, rows: Any, **sizes: Any) -> None:
        before = [memory.s_forced[index] for index in range(memory.s_forced.shape[0])]
        function(memory, rows, **sizes)
        for index, one in enumerate(before):
            memory.s_forced[index] = one

    return wrong


def all_counts(function: Function) -> Function:
    """The end of a round in which every sequence seems to emit something."""

    def wrong(memory: Any, rows: Any, *, count: Any, **sizes: Any) -> None:
        function(memory, rows, count=[jnp.int32(1)] * BATCH, **sizes)

    return wrong


MISTAKES = {
    "uniform_of_another_place": wrong(
        "a draft is judged by the random number of the position behind it",
        "_uniform",
        changed(1, next_place),
    ),
    "proposal_ignored": wrong(
        "a draft is accepted with probability p, whatever it was drawn with",
        "_of_draft",
        result(jnp.ones_like),
    ),
    "residual_forgotten": wrong(
        "behind a rejected draft a token is drawn from p, not from what p has more than q",
        "race",
        with_runner(lambda one: replace(one, proposal=0 * one.proposal)),
    ),
    "race_of_another_place": wrong(
        "a token is drawn with the random numbers of the position before it",
        "race",
        with_runner(lambda one: replace(one, position=one.position - 1)),
    ),
    "seed_words_exchanged": wrong(
        "the two words of a seed are exchanged",
        "race",
        with_runner(lambda one: replace(one, seed=one.seed[::-1])),
    ),
    "race_of_another_row": wrong(
        "the token behind the accepted drafts is drawn from the row before",
        "race",
        with_runner(lambda one: replace(one, row=jnp.maximum(one.row - 1, 0))),
    ),
    "options_of_the_other": wrong(
        "a sequence is filtered by the options of another one",
        "filters_of",
        result(of_the_other),
    ),
    "guessed": wrong(
        "a row whose filter may keep more than the list shows is drawn all the same",
        "find_cut",
        result(lambda cut: replace(cut, decided=jnp.ones_like(cut.decided))),
    ),
    "drafts_of_another_place": wrong(
        "drafts are drawn with the random numbers of the position behind them",
        "sampled_walk",
        changed("positions", next_place),
        module=SUPPORT,
    ),
    "rows_not_carried": wrong(
        "what drafts were drawn from stays that of an earlier round",
        "end_sampled_round",
        without_rows,
        module=SUPPORT,
    ),
    "rows_carried_undecided": wrong(
        "a sequence that is not decided hands on the candidates of the round",
        "end_sampled_round",
        all_counts,
        module=SUPPORT,
    ),
    "still_forced": wrong(
        "what is forced is forced in the launch's next round, too",
        "end_sampled_round",
        still_forced,
        module=SUPPORT,
    ),
}
QUICK = ("proposal_ignored",)


def check_draws(session: KernelSession) -> None:
    """Rounds that draw, one that is not decided, and one that is told what to emit."""
    for seed in range(SEEDS):
        carried, before = with_likely_drafts(session)
        options = (replace(WARM, seed=(seed, 1)), replace(OTHER, seed=(seed, 2)))
        found = launch(session, carried, options)
        check_round(session, carried, options, before, found)
    before, carried = proposed(session), dict(found.carried)
    found = launch(session, carried, options)
    check_round(session, carried, options, before, found)

    before, carried = proposed(session), dict(found.carried)
    found = launch(session, carried, (FLAT, OTHER))
    assert found.counts[0, 0] == 0
    assert found.counts[0, 1] > 0
    for old, new in zip(before, proposed(session), strict=True):
        np.testing.assert_array_equal(old[:ROWS], new[:ROWS])

    forced = forced_tokens(BATCH, ROWS, {0: np.array(FORCED)})
    both = launch(session, begin(session), (WARM, GREEDY), rounds=2, forced=forced)
    assert both.tokens[0, 0, : len(FORCED)].tolist() == FORCED
    first = launch(session, begin(session), (WARM, GREEDY), forced=forced)
    second = launch(session, dict(first.carried), (WARM, GREEDY))
    np.testing.assert_array_equal(both.tokens, [first.tokens[0], second.tokens[0]])


@pytest.mark.parametrize("name", names(MISTAKES, QUICK))
def test_the_kernel_draws_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name].make(monkeypatch)
    session = session_of(1, Mode.GENERIC)
    with pytest.raises(AssertionError):
        check_draws(session)


def test_without_a_mistake_it_draws_what_the_reference_draws() -> None:
    check_draws(kernel())


def test_the_list_on_the_page_is_this_one() -> None:
    assert on_the_page("draws") == table(HEADING, MISTAKES)
