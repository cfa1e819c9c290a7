"""The prefix cache keeps chains of chunks within its bytes, and forgets what was used least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.prefix_cache import PrefixCache

ROWS = 2
SIZE = 16  # bytes of one checkpoint below


def snapshot(end: int) -> Snapshot:
    return Snapshot(
        start=end - ROWS,
        end=end,
        fixed={"state": np.zeros(2, np.int32)},
        rows={"kv": np.ones(8, np.int8)},
    )


def fill(cache: PrefixCache, tokens: Sequence[int]) -> None:
    """Adds every chunk of a prompt, as a generator does after each prefill."""
    for end in range(ROWS, len(tokens) + 1, ROWS):
        if cache.wants(tokens[:end]):
            cache.add(tokens[:end], snapshot(end))


def cache_of(chunks: int) -> PrefixCache:
    """A cache with room for so many checkpoints."""
    return PrefixCache(rows=ROWS, max_bytes=chunks * SIZE)


def found(cache: PrefixCache, tokens: Sequence[int]) -> int:
    """How many tokens of a prompt are known."""
    chain = cache.find(tokens)
    assert [(one.start, one.end) for one in chain] == [
        (end - ROWS, end) for end in range(ROWS, len(chain) * ROWS + 1, ROWS)
    ]
    return len(chain) * ROWS


def test_the_longest_common_prefix_of_whole_chunks_is_found() -> None:
    cache = cache_of(10)
    fill(cache, [1, 2, 3, 4, 5, 6])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == 6
    assert found(cache, [1, 2, 3, 4, 5, 9]) == 4
    assert found(cache, [1, 2, 3, 9, 5, 6]) == 2
    assert found(cache, [9, 2, 3, 4, 5, 6]) == 0


def test_the_last_token_of_a_prompt_is_never_found() -> None:
    """It has to be fed, or nobody knows its logits."""
    cache = cache_of(10)
    fill(cache, [1, 2, 3, 4])
    assert found(cache, [1, 2, 3, 4]) == 2
    assert found(cache, [1, 2, 3, 4, 5]) == 4
    assert found(cache, [1, 2]) == 0


def test_the_same_chunk_behind_other_tokens_is_another_one() -> None:
    cache = cache_of(10)
    fill(cache, [1, 2, 7, 7])
    fill(cache, [3, 4])
    assert found(cache, [3, 4, 7, 7, 0]) == 2


def test_least_recently_used_chunks_go_first() -> None:
    cache = cache_of(3)
    for first in (10, 20, 30):
        fill(cache, [first, 0])
    assert found(cache, [10, 0, 1]) == 2  # now 20 is the oldest
    fill(cache, [40, 0])
    assert cache.statistics.evictions == 1
    assert [found(cache, [first, 0, 1]) for first in (10, 20, 30, 40)] == [2, 0, 2, 2]


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    cache = cache_of(3)
    fill(cache, [1, 2, 3, 4, 5, 6])
    fill(cache, [9, 9])
    assert found(cache, [1, 2, 3, 4, 5, 6, 7]) == 4


def test_a_chunk_without_its_parents_is_not_kept() -> None:
    cache = cache_of(3)
    assert not cache.wants([1, 2, 3, 4])
    assert not cache.add([1, 2, 3, 4], snapshot(4))
    assert len(cache) == 0
    assert cache.bytes == 0


def test_only_whole_chunks_are_wanted() -> None:
    cache = cache_of(3)
    assert cache.wants([1, 2])
    assert not cache.wants([1, 2, 3])
    assert not cache.wants([])


def test_a_checkpoint_larger_than_the_cache_is_not_kept() -> None:
    cache = PrefixCache(rows=ROWS, max_bytes=SIZE - 1)
    assert not cache.add([1, 2], snapshot(2))
    assert cache.bytes == 0


def test_statistics() -> None:
    cache = cache_of(4)
    fill(cache, [1, 2, 3, 4])
    cache.find([1, 2, 3, 4, 5])
    cache.find([8, 8, 8])
    seen = cache.statistics
    assert (seen.queries, seen.hits, seen.prompt_tokens, seen.hit_tokens) == (2, 1, 8, 4)
    cache.clear()
    assert (len(cache), cache.bytes) == (0, 0)
    assert found(cache, [1, 2, 3]) == 0


prompts = strategies.lists(strategies.integers(0, 1), min_size=1, max_size=9)


@settings(max_examples=200, deadline=None)
@given(
    actions=strategies.lists(strategies.tuples(strategies.booleans(), prompts), max_size=30),
    room=strategies.integers(0, 6),
)
def test_whatever_happens_chains_are_whole_and_bytes_are_bounded(
    actions: list[tuple[bool, list[int]]], room: int
) -> None:
    """Against a record of what was ever added: nothing is found that was not, and no gap."""
    cache = cache_of(room)
    added: set[tuple[int, ...]] = set()
    for fills, tokens in actions:
        if fills:
            fill(cache, tokens)
            added |= {tuple(tokens[:end]) for end in range(ROWS, len(tokens) + 1, ROWS)}
        known = found(cache, tokens)
        assert known < len(tokens)
        assert known == 0 or tuple(tokens[:known]) in added
        assert cache.bytes == SIZE * len(cache) <= SIZE * room
        reachable = sum(found(cache, [*prefix, 0]) == len(prefix) for prefix in added)
        assert reachable == len(cache), "a chunk that no prompt can reach"
