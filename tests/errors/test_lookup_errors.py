"""Lookups that a graph may say and the kernel cannot do."""

from __future__ import annotations

from collections.abc import Callable

import mkc
from mkc.errors import UnsupportedGraphError
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Pipeline
from mkc.targets import load_target
from tests.errors.expect import refused

VOCAB, HIDDEN = 512, 256


def head(h: mkc.Tensor) -> mkc.Outputs:
    return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))


def table_per_layer(step: mkc.Step) -> mkc.Outputs:
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(3):
        h = h + mkc.embed(step.tokens, layer.param("table.weight", [VOCAB, HIDDEN]))
    return head(h)


def computed_ids(step: mkc.Step) -> mkc.Outputs:
    table = mkc.param("embed.weight", [VOCAB, HIDDEN])
    first = mkc.embed(step.tokens, table)
    logits = mkc.linear(first, mkc.param("draft.weight", [VOCAB, HIDDEN]))
    return head(mkc.embed(mkc.argmax(logits), table))


def compile_program(decoder: Callable[[mkc.Step], mkc.Outputs]) -> None:
    graph = mkc.trace(decoder, name="lookup", batch=1, context=16)
    Pipeline(shard=Shard(ranks=1)).run(graph, load_target("tpu7x"))


def test_a_table_of_its_own_in_every_layer() -> None:
    with refused(
        UnsupportedGraphError,
        "test_lookup_errors.py:",
        "embed: 'model.layers.{index}.table.weight'",
        "table of its own in every layer",
        "Look it up before the layers",
    ):
        compile_program(table_per_layer)


def test_ids_that_the_step_computes() -> None:
    with refused(
        UnsupportedGraphError,
        "test_lookup_errors.py:",
        "embed: %argmax is computed in the step",
        "Look up step.tokens or step.positions",
    ):
        compile_program(computed_ids)
