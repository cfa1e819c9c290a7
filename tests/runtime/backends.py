"""Golden models on real backends, each compiled once per test process."""

from __future__ import annotations

from functools import cache

from mkc.ir.token_masks import with_token_masks
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.goldens import golden_case
from tests.kernel.harness import TARGET
from tests.kernel.harness import build
from tests.kernel.harness import golden_subject
from tests.runtime.fake_backend import FakeBackend

BATCH = 3
ROUNDS = 4


@cache
def backend_of(name: str, kind: str, *, ranks: int = 1) -> Backend:
    """A golden model with BATCH slots; all slots empty at first."""
    case = golden_case(name)
    weights = case.weights()
    if kind == "reference":
        graph = case.graph(batch=BATCH)
        return ReferenceBackend(graph, lambda one: weights[one], rounds_per_launch=ROUNDS)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=ROUNDS))
    subject = golden_subject(name)
    lowered = pipeline.run(with_token_masks(subject.trace(BATCH)), load_target(TARGET))
    mode = Mode.GENERIC if ranks == 1 else Mode.EAGER
    return KernelBackend(build(subject, lowered, mode.parameters()))


def fits_the_protocol() -> Backend:
    """Type checkers see that the backend of the other tests is one."""
    return FakeBackend()
