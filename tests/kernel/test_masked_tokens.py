"""Masks of allowed tokens as an input of the kernel, in the TPU interpreter at its most hostile."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from numpy.testing import assert_array_equal

from mkc.ir.token_masks import mask_words
from mkc.ir.token_masks import with_token_masks
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.kernel import StepResult
from mkc.runtime.token_masks import pack_mask
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.goldens import golden_case
from tests.kernel.harness import TARGET
from tests.kernel.harness import Array
from tests.kernel.harness import RecordingSession
from tests.kernel.harness import build
from tests.kernel.harness import golden_subject

BATCH = 3
VOCAB = golden_case("qwen38_lane").expected["prefill.logits"].shape[-1]
TOKENS = np.array([11, 7, 5], np.int32)
CASES = [
    pytest.param("qwen38_lane", 1, Mode.GENERIC, id="lane-1-rank"),
    pytest.param("qwen38_mini", 1, Mode.GENERIC, id="mini-1-rank"),
    pytest.param("qwen38_lane", 2, Mode.LATE, id="lane-2-ranks-races"),
    pytest.param(
        "qwen38_mini", 2, Mode.LATE, id="mini-2-ranks-races", marks=pytest.mark.long
    ),
]  # fmt: skip


@cache
def session(
    name: str, ranks: int, mode: Mode, *, masks: bool = True, rounds: int = 1
) -> RecordingSession:
    subject = golden_subject(name)
    graph = subject.trace(BATCH)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=rounds))
    lowered = pipeline.run(with_token_masks(graph) if masks else graph, load_target(TARGET))
    return build(subject, lowered, mode.parameters())


def first_step(kernel: RecordingSession, masks: list[Array | None]) -> tuple[StepResult, Array]:
    """The first step of empty sequences, and its logits."""
    kernel.clear_states()
    result = kernel.step(TOKENS, np.zeros(BATCH, np.int32), masks=masks)
    detector = interpret_pallas_call.races
    assert detector is None or not detector.races_found
    assert result.logits is not None
    return result, result.logits


@pytest.mark.parametrize(("name", "ranks", "mode"), CASES)
def test_the_largest_logit_of_the_allowed_tokens_is_next(name: str, ranks: int, mode: Mode) -> None:
    """Every sequence sees its own mask; one without a mask gets what a kernel without them gives,
    bit for bit, and so do all when every token is allowed."""
    plain, logits = first_step(session(name, ranks, mode, masks=False), [])
    kernel = session(name, ranks, mode)
    vocab = logits.shape[1]
    allowed = np.random.default_rng(3).uniform(size=vocab) < 0.3
    allowed[logits[1].argmax()] = False
    last = np.arange(vocab) == vocab - 1

    masked, found = first_step(kernel, [None, pack_mask(allowed), pack_mask(last)])
    assert_array_equal(found[0], logits[0])
    assert_array_equal(found[1], np.where(allowed, logits[1], -np.inf))
    assert_array_equal(found[2], np.where(last, logits[2], -np.inf))
    best = int(np.where(allowed, logits[1], -np.inf).argmax())
    assert masked.next_token.tolist() == [plain.next_token[0], best, vocab - 1]

    free, found = first_step(kernel, [])
    assert_array_equal(found, logits)
    assert_array_equal(free.next_token, plain.next_token)


def test_where_nothing_is_allowed_the_lowest_id_is_next() -> None:
    """As in the reference; the generator refuses such a mask before."""
    kernel = session("qwen38_lane", 2, Mode.LATE)
    nothing = np.zeros(mask_words(VOCAB), np.uint32)
    masked, found = first_step(kernel, [None, nothing, None])
    assert masked.next_token[1] == 0
    assert (found[1] == -np.inf).all()


def test_masks_hold_in_every_round_of_a_launch() -> None:
    """They are copied anew in each."""
    kernel = session("qwen38_lane", 1, Mode.GENERIC, rounds=3)
    allowed = np.arange(VOCAB) % 5 == 2
    kernel.clear_states()
    launched = kernel.launch(
        TOKENS,
        np.zeros(BATCH, np.int32),
        rounds=[3] * BATCH,
        masks=[pack_mask(allowed), None, None],
    )
    assert launched.rounds == 3
    assert allowed[launched.tokens[:, 0]].all()
    assert not allowed[launched.tokens[:, 1:]].all()
