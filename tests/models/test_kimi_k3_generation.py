"""Generation with the golden Kimi K3 checkpoints: folder, loading, prefill, 64 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from mkc.cli.generation import model_of
from mkc.driver import lower_graph
from mkc.runtime.backends.opening import open_kernel
from mkc.runtime.backends.opening import open_reference
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.targets import load_target
from tests.goldens import golden_case
from tests.kernel.test_mixtures import subject_of
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


def test_the_kernel_generates_what_the_reference_does(tmp_path: Path) -> None:
    """Two layers with experts in MXFP4, from a packed folder; the second prompt goes
    on from states that were kept of the first one."""
    subject = subject_of("mxfp4")
    graph, target = subject.trace(2), load_target("tpu7x:2x2x1")
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(dict(subject.weights), folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    lowered = lower_graph(graph, target, tp=1)
    pack(checkpoint, lowered, tmp_path / "packed")
    kernel = open_kernel(
        "interpret",
        graph,
        checkpoint,
        target=target,
        tp=1,
        rounds_per_launch=4,
        packed=tmp_path / "packed",
    )
    reference = open_reference(graph, checkpoint, rounds_per_launch=4)
    prompt = subject.prompt.tolist()
    found = []
    for opened in (kernel, reference):
        cache = PrefixCache(rows=16, max_bytes=1 << 24)
        generator = Generator(opened.backend, prefix_cache=cache)
        one = generator.generate(Request(tokens=prompt[:20], max_tokens=7))
        other = generator.generate(Request(tokens=[*prompt[:16], 5, 6], max_tokens=7))
        assert (one.finish.statistics.cached_tokens, other.finish.statistics.cached_tokens) == (
            0,
            16,
        )
        found.append((one.tokens, other.tokens))
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 3, "the same token again and again says little"


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
