"""Generation with the golden Kimi K3 checkpoints: folder, loading, prefill, 64 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkc.cli.generation import model_of
from mkc.runtime.backends.opening import open_reference
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from tests.goldens import golden_case
from tests.kimi_goldens import KIMI_CASES
from tests.kimi_goldens import kimi_case
from tests.runtime.checkpoints import write_checkpoint
from tests.spark_goldens import SPARK_TARGET
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_round
from tests.spark_goldens import spark_weights


def test_a_config_says_which_model_it_is() -> None:
    """Without --model the first family that accepts the config is taken."""
    assert [model_of(kimi_case(name).config) for name in KIMI_CASES] == ["kimi_k3"] * 2
    assert model_of(golden_case("qwen38_mini").meta["config"]) == "qwen38"


@pytest.mark.parametrize("name", KIMI_CASES)
def test_a_checkpoint_generates_the_recorded_tokens(name: str, tmp_path: Path) -> None:
    """In two slots at once, the second a token behind."""
    case = kimi_case(name)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "weights", case))
    opened = open_reference(case.graph(batch=2), checkpoint, rounds_per_launch=4)
    assert opened.not_finite == ()
    expected = case.expected["decode.tokens"].tolist()
    prompt = case.expected["prompt"].tolist()
    later = [*prompt, expected[0]]
    requests = [Request(tokens=one, max_tokens=64 - n) for n, one in enumerate((prompt, later))]
    emitted: list[list[int]] = [[], []]
    reasons = []
    for delta in Generator(opened.backend).run(requests):
        emitted[delta.sequence] += delta.tokens
        if delta.finish is not None:
            reasons.append(delta.finish.reason)
    assert emitted == [expected, expected[1:]]
    assert reasons == [FinishReason.LENGTH] * 2


def test_a_drafter_opens_and_is_accepted_now_and_then(tmp_path: Path) -> None:
    """Which tokens rounds emit is checked in `tests.spec.test_dspark_rounds`."""
    case, draft = kimi_case(SPARK_TARGET), spark_case()
    target = Checkpoint.open(write_checkpoint(tmp_path / "target", case))
    drafter = write_checkpoint(tmp_path / "drafter", draft, weights=spark_weights())
    opened = open_speculative(spark_round(), target, Checkpoint.open(drafter), rounds_per_launch=8)
    assert "scheme dspark with up to 7 drafts" in opened.description
    generator = Generator(opened.backend)
    prompt = case.expected["prompt"].tolist()
    output = generator.generate(Request(tokens=prompt, max_tokens=40))
    assert len(output.tokens) == 40
    assert list(output.tokens[:2]) == case.expected["decode.tokens"][:2].tolist()
