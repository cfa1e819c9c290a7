"""Parameters that a checkpoint stores member by member, divided over a mesh."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import mkc
from mkc.ir.reference import stack_params
from mkc.runtime.placement import shard_params
from mkc.runtime.shards import Array


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Three layers of four experts, and one stack outside of them."""
    table = mkc.param("embed.weight", [8, 6])
    h = mkc.embed(step.tokens, table)
    for layer in mkc.layers(3, prefix="layers.{index}."):
        h = h + experts(h, layer.param)
    return mkc.next_token(h + experts(h, mkc.param), table)


def experts(h: mkc.Tensor, param: Callable[..., mkc.Tensor]) -> mkc.Tensor:
    ids, weights = mkc.route(mkc.linear(h, param("gate", [4, 6]), dtype=mkc.F32), 2)
    gate, up, down = (
        param(f"experts.{{member}}.{name}", axes, mkc.F32)
        for name, axes in (("in", [4, 5, 6]), ("up", [4, 5, 6]), ("down", [4, 6, 5]))
    )
    return mkc.expert_mlp(h, ids, weights, gate=gate, up=up, down=down)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_device_reads_its_own_members(count: int) -> None:
    graph = mkc.trace(decoder, name="members", batch=1, context=4)
    read: list[str] = []

    def load(name: str) -> Array:
        read.append(name)
        param = next(one for one in graph.params.values() if name in one.tensor_names())
        seed = sum(name.encode())
        return np.random.default_rng(seed).normal(size=param.tensor_type.shape)

    names = [name for one in graph.params.values() for name in one.tensor_names()]
    assert len([name for name in names if "experts" in name]) == (3 + 1) * 3 * 4
    expected = stack_params(graph, {name: load(name) for name in names})
    read.clear()
    mesh = Mesh(np.array(jax.devices()[:count]), ("ranks",))
    found = shard_params(graph, load, mesh)
    for key, one in expected.items():
        assert (np.asarray(found[key]) == np.asarray(one)).all(), key
    # Four members over the devices: nobody reads one of another's.
    stacked = [name for name in read if "experts" in name]
    assert len(stacked) == len(set(stacked))
