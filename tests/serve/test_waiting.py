"""The queue: order for one owner, turns between owners."""

from __future__ import annotations

from serve.waiting import FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    return [queue.take() for _ in range(len(queue))]


def filled(*entries: str) -> FairQueue[str]:
    """Entries such as `a1`; the owner is the letter."""
    queue = FairQueue[str](len(entries))
    for one in entries:
        queue.put(one[0], one)
    return queue


def test_one_owner_is_served_in_order() -> None:
    assert drained(filled("a1", "a2", "a3")) == ["a1", "a2", "a3"]


def test_owners_take_turns() -> None:
    """Who has sent a hundred requests does not make others wait for all of them."""
    queue = filled("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    assert drained(queue) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_an_owner_that_comes_back_waits_for_its_turn() -> None:
    queue = filled("a1", "b1")
    assert queue.take() == "a1"
    queue.put("a", "a2")
    assert drained(queue) == ["b1", "a2"]


def test_entries_can_be_taken_out() -> None:
    queue = filled("a1", "a2", "b1")
    assert queue.remove(lambda one: one.endswith("1")) == ["a1", "b1"]
    assert len(queue) == 1
    assert queue.clear() == ["a2"]
    assert not queue
