"""Prompts over weights divided within groups of ranks, and over joined and scattered sums."""

from __future__ import annotations

import numpy as np
import pytest

from mkc.passes.pipeline import Lowered
from mkc.runtime.prefill import Prefill
from tests.kernel import test_group_gathers
from tests.kernel import test_scattered_kernel
from tests.kernel.harness import Subject
from tests.kernel.harness import build
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.test_other_graphs import subject_of
from tests.passes import test_joined_sums

TOKENS = 5


def groups() -> tuple[Subject, Lowered]:
    subject = subject_of(test_group_gathers.decoder, "group_gathers", test_group_gathers.VOCAB)
    return subject, test_group_gathers.lower(1)


def joined() -> tuple[Subject, Lowered]:
    subject = subject_of(test_joined_sums.branches(), "branches", test_joined_sums.VOCAB)
    return subject, lower(subject, ranks=2, batch=1)


def scattered() -> tuple[Subject, Lowered]:
    decoder = test_scattered_kernel.decoder
    subject = subject_of(decoder, "scattered", test_scattered_kernel.VOCAB)
    return subject, test_scattered_kernel.lower(1, "shard{gather_all=True}")


@pytest.mark.parametrize("case", [groups, joined, scattered])
def test_a_prompt_gives_the_logits_of_its_last_token(case: object) -> None:
    assert callable(case)
    subject, lowered = case()
    session = build(subject, lowered, True)
    prefill = Prefill(lowered=lowered, mesh=session.mesh)
    reference = reference_of(subject)
    prompt = [int(one) for one in reference.tokens[:TOKENS, 0]]
    logits = np.asarray(prefill.run(session.operands, prompt).logits, np.float32)[0]
    expected = reference.logits[TOKENS - 1, 0]
    assert np.abs(logits - expected).max() <= reference.logits_abs
