"""The masks of a round's rows: along drafts, with and without a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkc.errors import NoTokenAllowedError
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import Choice
from mkc.runtime.sequence import RunningSequence
from mkc.runtime.token_masks import unpack_mask
from tests.runtime.constraints import Constraint

VOCAB, STOP = 40, 39


def sequence(allowed: dict[tuple[int, ...], set[int]] | None, **options: int) -> RunningSequence:
    """A sequence that has emitted the token 1; allowed ids by the output that they follow."""

    def mask(output: Sequence[int]) -> Array:
        assert allowed is not None
        return np.isin(np.arange(VOCAB), sorted(allowed.get(tuple(output), set())))

    constraint = Constraint(mask) if allowed is not None else None
    found = RunningSequence(
        Request(tokens=[5], constraint=constraint, **options),
        number=0,
        slot=0,
        vocab=VOCAB,
        max_tokens=20,
        stop_ids=[STOP],
        seed=0,
        output=None,
    )
    found.take(Choice(token=1))
    return found


def ids(masks: Sequence[Array | None]) -> list[set[int] | None]:
    return [
        None if one is None else set(np.flatnonzero(unpack_mask(one, VOCAB)).tolist())
        for one in masks
    ]


def test_masks_follow_the_drafts_up_to_one_that_is_not_allowed() -> None:
    own = sequence({(1,): {2, 3}, (1, 2): {4}, (1, 2, 4): {6, STOP}})
    assert ids(own.row_masks([2, 4, 7, 8])) == [{2, 3}, {4}, {6, STOP}]
    assert ids(own.row_masks([3 + 4, 2])) == [{2, 3}]
    assert ids(own.row_masks([])) == [{2, 3}]
    assert own.output == own.request.constraint.output == [1], "looking ahead changes nothing"


def test_nothing_follows_a_stop() -> None:
    own = sequence({(1,): {STOP}, (1, STOP): {2}})
    assert ids(own.row_masks([STOP, 2])) == [{STOP}]


def test_stop_ids_wait_until_the_output_is_long_enough() -> None:
    own = sequence(None, min_tokens=3)
    everything = set(range(VOCAB))
    assert ids(own.row_masks([2, 3, 4])) == [everything - {STOP}, everything - {STOP}, None, None]
    assert ids(sequence(None).row_masks([2, 3])) == [None]


def test_a_draft_behind_which_nothing_is_allowed() -> None:
    """The sequence ends there with an error if it gets there, and what it has stays."""
    own = sequence({(1,): {2, 3}, (1, 2): {4}})
    assert ids(own.row_masks([2, 4, 5])) == [{2, 3}, {4}, None]
    own.take_proposed([2, 4, 9])
    assert own.output == [1, 2, 4]
    assert own.finish is not None
    assert own.finish.reason is FinishReason.ERROR
    assert isinstance(own.finish.error, NoTokenAllowedError)

    other = sequence({(1,): {2, 3}, (1, 2): {4}})
    other.row_masks([2, 4, 5])
    other.take_proposed([3])
    assert (other.output, other.finish) == ([1, 3], None)


def test_nothing_is_allowed_at_once() -> None:
    own = sequence({})
    own.row_masks([2])
    assert own.finish is not None
    assert own.finish.reason is FinishReason.ERROR
