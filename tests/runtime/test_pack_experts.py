"""Entries of experts, taken apart again: every weight is where the kernel looks for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.mxfp4 import CODES
from mkc.ir.mxfp4 import SCALE_BIAS
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.runtime.pack import Packer
from mkc.schedule.expert_store import CODE_ROWS
from mkc.schedule.expert_store import whole
from mkc.targets import load_target
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_kimi

type Array = NDArray[Any]


@cache
def lowered(mxfp4: bool, ranks: int) -> Lowered:
    graph = small_kimi(layers=3, latent=[3], dense=1, mxfp4=mxfp4)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower())
    return pipeline.run(graph, load_target("tpu7x:2x2x1"))


@cache
def weights(mxfp4: bool) -> dict[str, Array]:
    return kimi_weights(small_kimi(layers=3, latent=[3], dense=1, mxfp4=mxfp4), 3, heads=8)


def decoded(codes: Array, scales: Array) -> Array:
    """Values [outputs, inputs] of a checkpoint's codes and scales, one by one."""
    low, high = CODES[codes & 15], CODES[codes >> 4]
    values = np.stack([low, high], axis=-1).reshape(codes.shape[0], -1)
    factors = np.exp2(scales.astype(np.float32) - SCALE_BIAS)
    return np.asarray(values * np.repeat(factors, 32, axis=1))


def expert_of(name: str, expert: int, mxfp4: bool) -> Array:
    """A matrix [outputs, inputs] of layer 1."""
    key = f"language_model.model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"
    if not mxfp4:
        return np.asarray(weights(mxfp4)[key], np.float32)
    return decoded(weights(mxfp4)[f"{key}_packed"], weights(mxfp4)[f"{key}_scale"])


def unpacked(entry: Array, inputs: int, mxfp4: bool) -> Array:
    """Values [inputs, columns] of an entry as the kernel reads it."""
    if not mxfp4:
        return np.asarray(entry, np.float32)
    rows = entry.view(np.uint8)
    codes, scales = rows[: inputs // 2], rows[inputs // 2 : inputs // 2 + inputs // 32]
    return decoded(codes.T, scales.T).T


@pytest.mark.parametrize(("mxfp4", "ranks"), [(False, 1), (False, 4), (True, 2), (True, 8)])
def test_every_weight_is_on_one_rank(mxfp4: bool, ranks: int) -> None:
    program = lowered(mxfp4, ranks).program
    sharded = lowered(mxfp4, ranks).steps.sharded
    packer = Packer(program=program, sharded=sharded, load=lambda name: weights(mxfp4)[name])
    plan, held = program.experts[0], program.expert_rings[0].slice
    assert plan.groups * plan.slices == ranks
    width = held.width
    for rank in range(ranks):
        group, place = divmod(rank, plan.slices)
        mine = slice(place * width, (place + 1) * width)
        for local in (0, plan.local - 1):
            expert = group * plan.local + local
            both = packer.expert_item(plan.gate_up_array, local, rank)
            both = unpacked(both, held.inner, mxfp4)[: held.inner]
            gate, up = (expert_of(name, expert, mxfp4)[mine].T for name in ("w1", "w3"))
            assert np.array_equal(both[:, :width], gate)
            assert np.array_equal(both[:, width : 2 * width], up)
            assert not both[:, 2 * width :].any()
            inputs = whole(width, CODE_ROWS) if mxfp4 else width
            down = packer.expert_item(plan.down_array, local, rank)
            down = unpacked(down, inputs, mxfp4)
            assert np.array_equal(down[:width], expert_of("w2", expert, mxfp4)[:, mine].T)
            assert not down[width:].any()
