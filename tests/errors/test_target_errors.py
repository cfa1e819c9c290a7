"""Targets that do not exist, and meshes that do not divide the model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

import mkc
import mkc.passes.shard_rules  # registers how the built-in ops divide
from mkc.errors import ShardingError
from mkc.errors import UnknownTargetError
from mkc.errors import UnsupportedOpError
from mkc.ir.ops import Op
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from mkc.passes.p10_shard import Shard
from mkc.schedule.decisions import DecisionLog
from mkc.targets.loader import known_targets
from mkc.targets.loader import load_target
from tests.errors.expect import refused


def test_unknown_target_lists_the_known_ones() -> None:
    with refused(UnknownTargetError, "'tpu9'", "NAME:TOPOLOGY", *known_targets()):
        load_target("tpu9")


def test_unknown_topology_lists_those_of_the_target() -> None:
    names = [one.name for one in load_target("v6e").topologies]
    with refused(UnknownTargetError, "'v6e:3x5'", "v6e has no such topology", *names):
        load_target("v6e:3x5")


def mlp(inner: int, vocab: int = 64) -> Callable[[mkc.Step], mkc.Outputs]:
    """A model of one gated layer of width `inner`."""

    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [vocab, 32]))
        gate = mkc.silu(mkc.linear(h, mkc.param("gate.weight", [mkc.axis(inner, "mlp"), 32])))
        h = h + mkc.linear(gate, mkc.param("down.weight", [32, inner]))
        return mkc.next_token(h, mkc.param("head.weight", [mkc.axis(vocab, "vocab"), 32]))

    return decoder


def shard(decoder: Callable[[mkc.Step], mkc.Outputs], tp: int) -> None:
    graph = mkc.trace(decoder, name="tried", batch=1, context=16)
    Shard(ranks=tp).apply(graph, DecisionLog())


def test_tp_that_does_not_divide_a_projection() -> None:
    with refused(
        ShardingError,
        "test_target_errors.py:",
        "linear: tp 3 does not divide dimension 'mlp' of parameter 'gate.weight' (size 64)",
        "tp values that divide the model: 1, 2, 4, 8, 16, 32, 64",
        "with --tp",
    ):
        shard(mlp(inner=64), tp=3)


def test_tp_that_does_not_divide_the_vocabulary() -> None:
    with refused(
        ShardingError, "dimension 'vocab' of parameter 'head.weight' (size 50)", "model: 1, 2."
    ):
        shard(mlp(inner=64, vocab=50), tp=4)


@dataclass(frozen=True, kw_only=True)
class Alone(Op):
    mnemonic: ClassVar[str] = "test.alone"


@pytest.fixture
def alone() -> Iterator[None]:
    register_op(
        Alone,
        infer=lambda op, operands, states: operands[:1],
        reference=lambda op, operands, states, context: (operands, states),
    )
    yield
    unregister_op(Alone)


@pytest.mark.usefixtures("alone")
def test_op_without_a_sharding() -> None:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [64, 32])
        (h,) = mkc.apply(Alone(), mkc.embed(step.tokens, table))
        return mkc.next_token(h, table)

    with refused(
        UnsupportedOpError, "test_target_errors.py:", "'test.alone'", "sharding", "register_op"
    ):
        shard(decoder, tp=2)
