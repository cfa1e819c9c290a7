"""Kernels with experts, latent attention and residual blocks do what the proof is about."""

from __future__ import annotations

import pytest

from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.verify.case import launches_of
from mkc.targets import load_target
from tests.passes.kimi import small_kimi
from tests.schedule.verify.test_protocol import compare


@pytest.mark.parametrize(
    ("mxfp4", "ranks", "batch", "rounds"), [(True, 4, 1, 1), (False, 1, 3, 1), (True, 2, 2, 4)]
)
def test_traced_kernels(mxfp4: bool, ranks: int, batch: int, rounds: int) -> None:
    """Which experts are chosen is not known: as many as possible, none where all rest."""
    graph = small_kimi(layers=3, latent=[3], dense=1, mxfp4=mxfp4, batch=batch)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(rounds=rounds))
    lowered = pipeline.run(graph, load_target("tpu7x"))
    compare(lowered, sorted({0, ranks - 1}), launches_of(lowered.program))
