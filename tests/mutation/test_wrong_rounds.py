"""Mistakes in the arithmetic of rounds, which no proof of a schedule sees: the kernel beside the
loop that XLA evaluates shows every one of them.

Copies, waits and places stay as they were proven; what is computed, or with which rows, is wrong.
`docs/verifier.md` lists the kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest

from tests.codegen_pallas.support_run import Mode
from tests.kernel.rounds_harness import NO_STOPS
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Outcome
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import check
from tests.kernel.rounds_harness import continuations
from tests.kernel.rounds_harness import prompted
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import run_reference
from tests.kernel.rounds_harness import session_of
from tests.kernel.rounds_harness import with_drafts
from tests.mutation.wrong import Changed
from tests.mutation.wrong import Wrong
from tests.mutation.wrong import changed
from tests.mutation.wrong import names
from tests.mutation.wrong import on_the_page
from tests.mutation.wrong import table

HEADING = "mistake in the arithmetic of rounds"
BATCH, ROUNDS = 2, 2
LENGTHS = (21, 40)
WRONG = (3, 5)  # the draft of each sequence that is not accepted
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class WrongRound(Wrong):
    """A mistake in a function, or an edit of the kernel's text.

    Attributes:
      stops: it shows in a launch in which a sequence emits its stop id in the first round.
    """

    stops: bool = False
    edit: Callable[[str], str] = lambda text: text


def one_more(scalars: Any, index: Any) -> Any:
    return jnp.minimum(scalars[index] + 1, ROWS)


def one_less(scalars: Any, index: Any) -> Any:
    return jnp.maximum(scalars[index] - 1, 0)


def nothing(scalars: Any, index: Any) -> Any:
    return 0 * scalars[index]


def of_the_other(scalars: Any, index: Any) -> Any:
    return scalars[BATCH - 1 - index]


def own_row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Acceptance with the best token of the row itself, in place of the row before."""

    def wrong(best: Any, **named: Any) -> Any:
        return function(jnp.roll(best, -1, axis=0), **named)

    return wrong


def later_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache rows one position further on than they belong."""

    def wrong(kv: Any, layer: Any, sequence: Any, slot: Any, new: Any) -> Any:
        moved = new._replace(k=jnp.roll(new.k, 1, axis=0), v=jnp.roll(new.v, 1, axis=0))
        return function(kv, layer, sequence, slot, moved)

    return wrong


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A kernel's memory with other stop ids."""

    memory: Any
    stop_ids: Changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)


def stop_of_the_round_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """Whether a sequence ends is looked up before this round's tokens are there."""

    def wrong(memory: Any, index: Any, **named: Any) -> Any:
        def known(ids: Any, place: Any) -> Any:
            return jnp.where(index == 0, NO_STOPS, ids[place])

        early = Changed(scalars=memory.stop_ids, change=known)
        return function(Memory(memory=memory, stop_ids=early), index, **named)

    return wrong


def taps_exchanged(text: str) -> str:
    """Two layers that are read show themselves in each other's places."""

    def swap(match: re.Match[str]) -> str:
        other = {"0": "1", "1": "0"}
        return re.sub(r"\b[01]\b", lambda one: other[one[0]], match[0])

    edited = re.sub(r"support\.store_tap\([^\n]*\)", swap, text)
    assert edited != text
    return edited


def products_exchanged(text: str) -> str:
    """Keys and values of the block and of remembered rows change places."""
    names = sorted(set(re.findall(r"m\.(v_k_proj_\w+)\[:, support\.lanes", text)))
    assert len(names) == 2, names
    first, second = names
    stores = r"m\.%s(\[:, support\.lanes)"
    edited = re.sub(stores % first, r"m.OTHER\1", text)
    edited = re.sub(stores % second, rf"m.{first}\1", edited)
    return edited.replace("m.OTHER[", f"m.{second}[")


def causal_block(text: str) -> str:
    assert "causal=False" in text
    return text.replace("causal=False", "causal=True")


MISTAKES = {
    "commit_too_many": WrongRound(
        story="a recurrent state commits one row too many",
        name="kept_delta_rule",
        instead=changed(9, one_more),
    ),
    "commit_too_few": WrongRound(
        story="a recurrent state commits one row too few",
        name="kept_delta_rule",
        instead=changed(9, one_less),
    ),
    "convolution_too_many": WrongRound(
        story="a convolution commits one row too many",
        name="kept_conv",
        instead=changed("kept", one_more),
    ),
    "commit_skipped": WrongRound(
        story="a convolution commits nothing of what was accepted, the recurrent state does",
        name="kept_conv",
        instead=changed("kept", nothing),
    ),
    "stop_read_early": WrongRound(
        story="a sequence ends with the round behind the one that emits its stop id",
        stops=True,
        name="end_block_round",
        instead=stop_of_the_round_before,
    ),
    "commit_of_the_other": WrongRound(
        story="a state commits as many rows as another sequence accepted",
        name="kept_delta_rule",
        instead=changed(9, of_the_other),
    ),
    "rejected_remembered": WrongRound(
        story="the features of a rejected row enter the drafter's cache",
        name="kept_positions",
        instead=changed(1, one_more),
    ),
    "accepted_forgotten": WrongRound(
        story="the features of the last accepted row do not enter the drafter's cache",
        name="kept_positions",
        instead=changed(1, one_less),
    ),
    "rows_moved": WrongRound(
        story="cache rows are stored one position further on",
        name="_append",
        module="mkc.codegen_pallas.support.rows_attention",
        instead=later_rows,
    ),
    "own_row": WrongRound(
        story="a draft is compared with the best token of its own row",
        name="accept_greedy",
        instead=own_row,
    ),
    "taps_exchanged": WrongRound(
        story="the taps of two layers are exchanged",
        edit=taps_exchanged,
    ),
    "products_exchanged": WrongRound(
        story="keys of the block and keys of remembered rows are exchanged",
        edit=products_exchanged,
    ),
    "causal_block": WrongRound(
        story="rows of a block that sees itself whole see only those before",
        edit=causal_block,
    ),
}
QUICK = ("commit_too_many", "rejected_remembered")


@cache
def begin() -> Start:
    """Behind two prompts, with drafts of which a part is accepted."""
    start = prompted(LENGTHS)
    for sequence, place in enumerate(WRONG):
        drafts = continuations(LENGTHS)[sequence][: ROWS - 1]
        drafts[place] ^= 1
        start = with_drafts(start, sequence, drafts)
    return start


@cache
def expected(*, stops: bool) -> Outcome:
    return run_reference(begin(), launch(stops=stops))


def launch(*, stops: bool) -> Launch:
    """Two rounds; with `stops` the first sequence emits its stop id in the first one."""
    unlimited = Launch.of(BATCH, ROUNDS)
    if not stops:
        return unlimited
    first = expected(stops=False).result
    token = int(first.tokens[0, 0, first.counts[0, 0] - 1])
    return replace(unlimited, stops=((token,), ()))


def played(edit: Callable[[str], str], *, stops: bool) -> Outcome:
    session = session_of(ranks=1, batch=BATCH, rounds=ROUNDS, mode=Mode.GENERIC, edit=edit)
    return run_kernel(session, begin(), launch(stops=stops))


@pytest.mark.parametrize("name", names(MISTAKES, QUICK))
def test_the_kernel_differs_from_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = MISTAKES[name]
    wrong.make(monkeypatch)
    found = played(wrong.edit, stops=wrong.stops)
    with pytest.raises(AssertionError):
        check(found, expected(stops=wrong.stops), begin(), launch(stops=wrong.stops))


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.long)])
def test_without_a_mistake_they_agree(stops: bool) -> None:
    found = played(lambda text: text, stops=stops)
    check(found, expected(stops=stops), begin(), launch(stops=stops))
    following = found.result.carried["positions"].reshape(BATCH, ROWS)[:, 0]
    assert found.result.counts[0].tolist() == [one + 1 for one in WRONG]
    assert (following < 0).tolist() == [stops, False]


def test_the_list_on_the_page_is_this_one() -> None:
    assert on_the_page("arithmetic") == table(HEADING, MISTAKES)
