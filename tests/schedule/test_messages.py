"""Messages of every kind of exchange."""

from __future__ import annotations

import pytest

from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.messages import Messages
from mkc.schedule.messages import exchange_us
from mkc.schedule.messages import messages
from mkc.schedule.messages import summed_elements
from mkc.targets import load_target


def plan(kind: str, *, rows: int = 8, columns: int = 5120, group: int = 0) -> ExchangePlan:
    return ExchangePlan(
        name="x",
        kind=kind,
        rows=rows,
        columns=columns,
        safe_because="a test",
        group=group,
        rounds=bool(group) and rows > 1,
    )


def sizes(plan: ExchangePlan, ranks: int) -> list[tuple[int, int]]:
    return [(one.peers, one.bytes) for one in messages(plan, ranks)]


def test_a_whole_partial_sum_or_shares_of_it() -> None:
    assert sizes(plan("one_shot"), 8) == [(7, 8 * 5120 * 4)]
    assert sizes(plan("two_phase"), 8) == [(7, 8 * 640 * 4), (7, 8 * 640 * 2)]
    assert sizes(plan("gather"), 8) == [(7, 8 * 5120 * 2)]


def test_two_levels() -> None:
    """Sums travel as f32, a rounded result as bf16; one row is f32 throughout."""
    share = 7168 // 8
    assert sizes(plan("two_level", columns=7168, group=8), 32) == [
        (7, 8 * share * 4),
        (3, 8 * share * 4),
        (7, 8 * share * 2),
    ]
    one_row = plan("two_level", rows=1, columns=7168, group=8)
    assert sizes(one_row, 32) == [(7, share * 4), (3, share * 4), (7, share * 4)]
    assert summed_elements(one_row, 32) == (8 + 4 + 8) * share


def test_peers_of_a_level() -> None:
    """Rank 13 of 32 is number 5 of the second host; its counterparts are 8 ranks apart."""
    assert Messages(members=8, stride=1, bytes=0).others(13) == [10, 11, 8, 9, 14, 15, 12]
    assert Messages(members=4, stride=8, bytes=0).others(13) == [21, 29, 5]
    assert Messages(members=3, stride=2, bytes=0).others(3) == [1, 5]


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_everyone_is_sent_to_by_those_it_sends_to(stride: int) -> None:
    level = Messages(members=4, stride=stride, bytes=0)
    for rank in range(4 * stride):
        assert all(rank in level.others(peer) for peer in level.others(rank))


def test_fewer_messages_pay_for_one_more_phase() -> None:
    target = load_target("tpu7x")
    levels = exchange_us(plan("two_level", rows=1, columns=7168, group=8), 32, target)
    assert levels < exchange_us(plan("two_phase", columns=8192), 32, target)
    assert levels < exchange_us(plan("one_shot", rows=1, columns=7168), 32, target)
