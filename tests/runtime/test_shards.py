"""Shards of all ranks together are the tensor again."""

from __future__ import annotations

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies

from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import Sharding
from mkc.runtime.shards import join_shards
from mkc.runtime.shards import take_shard


def tensor_type(parts: list[tuple[int, int]], axis: int, rank: int) -> TensorType:
    """A type of `rank` axes whose axis `axis` has the given (count, unit) parts."""
    divided = Axis(parts=tuple(Part(count=count, unit=unit) for count, unit in parts))
    whole = Axis(parts=(Part(count=3),))
    axes = tuple(divided if index == axis else whole for index in range(rank))
    return TensorType(dtype=DType.F32, axes=axes)


def numbered(type: TensorType) -> np.ndarray:
    """Every element is another number."""
    return np.arange(type.elements, dtype=np.float32).reshape(type.shape)


PARTS = strategies.lists(
    strategies.tuples(strategies.sampled_from([2, 4, 8, 16]), strategies.integers(1, 3)),
    min_size=1,
    max_size=3,
)


@given(PARTS, strategies.sampled_from([2, 4, 8, 16]), strategies.integers(1, 3), strategies.data())
def test_round_trip(
    parts: list[tuple[int, int]], ranks: int, rank: int, data: strategies.DataObject
) -> None:
    axis = data.draw(strategies.integers(0, rank - 1))
    shards = gcd(ranks, *(count for count, _ in parts))
    sharding = Sharding(axis=axis, shards=shards, copies=ranks // shards)
    type_ = tensor_type(parts, axis, rank)
    full = numbered(type_)
    found = [take_shard(full, type_, sharding, one) for one in range(ranks)]
    assert {one.shape for one in found} == {sharding.local(type_).shape}
    np.testing.assert_array_equal(join_shards(found, type_, sharding), full)
    elements = np.concatenate([one.ravel() for one in found])
    assert set(elements) == set(full.ravel())
    assert (np.unique(elements, return_counts=True)[1] == sharding.copies).all()


def test_a_rank_gets_its_units_of_every_part() -> None:
    """Two parts of four units: rank 1 of 4 has unit 1 of each."""
    type_ = tensor_type([(4, 2), (4, 1)], 0, 1)
    shard = take_shard(numbered(type_), type_, Sharding(axis=0, shards=4), 1)
    assert shard.tolist() == [2, 3, 9]


def test_neighbouring_ranks_hold_the_same_copy() -> None:
    type_ = tensor_type([(2, 2)], 0, 1)
    sharding = Sharding(axis=0, shards=2, copies=2)
    found = [take_shard(numbered(type_), type_, sharding, rank).tolist() for rank in range(4)]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_units_that_count_once_are_zero_on_the_copies() -> None:
    """So that the sum over all ranks has every unit once."""
    type_ = tensor_type([(2, 2)], 0, 1)
    sharding = Sharding(axis=0, shards=2, copies=2, once=True)
    found = [take_shard(numbered(type_), type_, sharding, rank).tolist() for rank in range(4)]
    assert found == [[0, 1], [0, 0], [2, 3], [0, 0]]


@pytest.mark.parametrize("rank", [0, 5])
def test_a_replicated_tensor_is_whole_everywhere(rank: int) -> None:
    type_ = tensor_type([(4, 1)], 0, 2)
    full = numbered(type_)
    assert take_shard(full, type_, REPLICATED, rank) is full
    assert join_shards([full, full], type_, REPLICATED) is full
