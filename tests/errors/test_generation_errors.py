"""Generation: prompts, options, and machines that cannot do what is asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mkc.errors import BackendError
from mkc.errors import BackendOptionError
from mkc.errors import GenerationOptionError
from mkc.errors import NotFiniteLogitsError
from mkc.errors import NoTokenAllowedError
from mkc.errors import PromptLengthError
from mkc.errors import PromptTokenError
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.constraints import Constraint
from tests.runtime.fake_backend import VOCAB
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.text.checkpoints import byte_level_checkpoint


def test_prompt_that_is_too_long() -> None:
    with refused(
        PromptLengthError, "has 40 tokens", "32 positions", "at most 31 tokens", "Shorten"
    ):
        Generator(FakeBackend(context=32)).add(Request(tokens=[1] * 40))


def test_more_tokens_than_the_context_has_room_for() -> None:
    with refused(PromptLengthError, "30 tokens and 3 tokens", "32 positions", "fewer tokens"):
        Generator(FakeBackend(context=32)).add(Request(tokens=[1] * 30, max_tokens=3))


def test_prompt_without_tokens_or_with_unknown_ones() -> None:
    with refused(PromptTokenError, "is empty", "at least one", "tokenizer"):
        Generator(FakeBackend()).add(Request(tokens=[]))
    with refused(PromptTokenError, "token id 420", "0 to 419"):
        Generator(FakeBackend()).add(Request(tokens=[VOCAB]))


def test_options_out_of_range() -> None:
    with refused(GenerationOptionError, "'top_p' is 1.5", "at most 1", "Correct"):
        SamplingParams(top_p=1.5)


def test_mask_that_allows_nothing() -> None:
    nothing = Constraint(lambda output: np.zeros(VOCAB, bool))
    with refused(NoTokenAllowedError, "position 1", "at least one", "Allow more"):
        Generator(FakeBackend()).generate(Request(tokens=[1], constraint=nothing))


def test_logits_that_are_not_numbers() -> None:
    broken = FakeBackend(logits=lambda history: np.full(VOCAB, np.nan, np.float32))
    with refused(NotFiniteLogitsError, "position 1", "NaN", "damaged weights"):
        Generator(broken).generate(Request(tokens=[1]))


def test_machine_without_a_tpu(command: Command, tmp_path: Path) -> None:
    """Nothing else is run instead."""
    byte_level_checkpoint(write_checkpoint(tmp_path / "model", "qwen38_lane"))
    command.refused(
        BackendError,
        "backend 'tpu'",
        "no TPU",
        "--backend interpret",
        argv="run -p hello --weights model --backend tpu --context 64",
    )


def test_more_ranks_than_devices(command: Command, tmp_path: Path) -> None:
    byte_level_checkpoint(write_checkpoint(tmp_path / "model", "qwen38_lane"))
    command.refused(
        BackendError,
        "8 CPU devices",
        "16 ranks",
        "smaller --tp",
        argv="run -p hello --weights model --backend interpret --tp 16 --context 64",
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--packed folder", "--packed with"),
        ("--packed folder --tp 2", "--packed, --tp with"),
        ("--target tpu7x", "--target with"),  # also where it says the default
        ("--target v6e --backend reference", "--target with"),
    ],
)
@pytest.mark.parametrize("start", ["run -p hello", "chat", "bench", "eval tasks.jsonl"])
def test_options_of_a_kernel_without_a_kernel(
    command: Command, tmp_path: Path, start: str, given: str, named: str
) -> None:
    """Nothing is ignored; the reference backend reads no packed weights."""
    task = {"id": "a", "task": "sums", "check": "exact", "answer": "19"}
    asked = {"messages": [{"role": "user", "content": "12 + 7"}]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task | asked))
    command.refused(
        BackendOptionError,
        f"{named} backend 'reference', which runs no kernel",
        "--backend interpret",
        argv=f"{start} {given}",
    )
