"""Answers of a model without a server: what a request becomes, generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkc.runtime.generate import Generator
from mkc.runtime.request import Output
from mkc.runtime.text import Reply
from mkc.runtime.text import joined
from serve.model import ServedModel
from serve.routes.chat import requests_of
from serve.schemas.base import read_body
from serve.schemas.chat import ChatCompletionRequest
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import fake_model

CONTEXT = 4096
QUESTION = {"messages": [{"role": "user", "content": "?"}]}


def noise(folder: Path, *, batch: int = 4) -> ServedModel:
    """A model whose logits are noise: left alone it writes nothing that could be read.

    Args:
      folder: has its tokenizer, and a template or channels.
    """
    return fake_model(folder, FakeBackend(batch=batch, context=CONTEXT))


def answers(model: ServedModel, body: dict[str, Any]) -> list[Output]:
    """The outputs of a chat completion, in order."""
    request, _ = read_body(ChatCompletionRequest, QUESTION | body, lenient=False)
    generator = Generator(model.backend, tokenizer=model.tokenizer)
    return [generator.generate(one) for one in requests_of(request, model)]


def reply(model: ServedModel, body: dict[str, Any]) -> tuple[Reply, Output]:
    """The only answer of a chat completion, and all of its output."""
    (output,) = answers(model, body)
    return joined(output.events), output
