"""The Kimi model's conversations as it is trained on them, and its weights at first."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from examples.tiny_family import KIMI_TINY
from examples.tiny_kimi import DECAY_BOUND
from examples.tiny_kimi import END
from examples.tiny_kimi import initial_tensor
from examples.tiny_tasks import draw
from examples.tiny_text import Teacher
from examples.train_tiny import Settings
from examples.train_tiny import initial_state
from examples.train_tiny import row_graph
from examples.train_tiny import tensors_of
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import joined

SHIPPED = Path(__file__).parents[2] / "models" / "kimi_tiny"


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(SHIPPED, KIMI_TINY.markup)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("task", KIMI_TINY.weights)
def test_what_is_taught_is_what_the_output_is_read_as(
    teacher: Teacher, task: str, thinking: bool
) -> None:
    """The answer's tokens, read back as an output, are the thought and the answer."""
    one = draw(Random(5), task, held_out=False)
    answer = {**one.answer, "reasoning_content": one.thought} if thinking else one.answer
    whole = teacher.encode([*one.messages, answer], thinking=thinking)
    begin = teacher.chat.encode(ChatRequest(messages=one.messages, thinking=thinking))
    assert whole[: len(begin.ids)] == begin.ids
    stream = teacher.chat.output(begin, tools=None)
    reply = joined(stream.feed(whole[len(begin.ids) :]).events)
    assert reply.reasoning == (one.thought if thinking else "")
    assert reply.content == one.answer["content"]
    mask = teacher.learned(whole)
    assert not mask[: len(begin.ids)].any(), "the prompt is not learned"
    assert mask[len(begin.ids) :].all(), "all of the answer is, the end of the turn too"
    assert whole[-1] == teacher.special(END)


def test_decays_begin_small() -> None:
    """A decay is the bound times a sigmoid of the bias, as long as the projections say nothing."""
    bias = initial_tensor(np.random.default_rng(0), "x.dt_bias", (256,))
    decay = DECAY_BOUND / (1 + np.exp(-bias))
    assert decay.min() > -0.21 and decay.max() < -0.0009


def test_written_tensors_are_those_of_the_encoded_model() -> None:
    """Names, shapes and bytes per number, before any training."""
    settings = Settings(rows=1, length=16)
    graph = row_graph(settings, KIMI_TINY)
    tensors = tensors_of(graph, initial_state(graph, settings, KIMI_TINY).weights, ".experts.")
    stored = KIMI_TINY.model.trace(KIMI_TINY.stored_config, batch=1, context=16)
    wanted = {
        name: param.tensor_type.shape
        for param in stored.params.values()
        for name in param.tensor_names()
    }
    assert {name: one.shape for name, one in tensors.items()} == wanted
    codes = [one.dtype for name, one in tensors.items() if ".experts." in name]
    assert codes and set(codes) == {np.dtype(np.uint8)}
