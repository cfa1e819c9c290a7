"""A model's place is taken by something that knows its answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from signal import SIGINT

import numpy as np

from mkc.cli import generation
from mkc.ir.graph import Graph
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.sampling import Array
from mkc.runtime.text import load_tokenizer
from tests.runtime.fake_backend import VOCAB
from tests.runtime.fake_backend import FakeBackend

CONTEXT = 304


class Answers(FakeBackend):
    """Takes the place of the model, and answers with a text whatever it is asked.

    Attributes:
      prompts: what it was asked, as text.
      interrupt: press Ctrl-C after so many tokens of an answer.
    """

    prefill_rows = CONTEXT  # a prompt comes in one call

    def __init__(
        self, folder: Path, answer: str | Callable[[str], str], *, batch: int = 1, rounds: int = 1
    ) -> None:
        """
        Args:
          answer: the text, or what gives it for the text of a prompt.
        """
        super().__init__(context=CONTEXT, batch=batch, rounds=rounds, logits=self.say)
        self.prompts: list[str] = []
        self.interrupt: int | None = None
        self._tokenizer = load_tokenizer(folder)
        self._answer = answer
        self._scripts: dict[tuple[int, ...], list[int]] = {}

    def opened(
        self, choice: generation.ModelChoice, graph: Graph, checkpoint: Checkpoint
    ) -> OpenedBackend:
        assert graph.context == CONTEXT
        assert graph.batch == self.batch
        return OpenedBackend(backend=self, description="no model", not_finite=("bad.w",))

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        prompt = self._tokenizer.decode(tokens)
        self.prompts.append(prompt)
        text = self._answer if isinstance(self._answer, str) else self._answer(prompt)
        whole = (*self.slots[slot], *tokens)
        self._scripts[whole] = self._tokenizer.encode(text, allow_special=True)
        return super().prefill(slot, tokens, position)

    def say(self, history: Sequence[int]) -> Array:
        """The next token of the answer to the prompt with which the history begins."""
        prompt = max((one for one in self._scripts if self._begins(history, one)), key=len)
        said, script = len(history) - len(prompt), self._scripts[prompt]
        if said == self.interrupt:
            os.kill(os.getpid(), SIGINT)
        row = np.zeros(VOCAB, np.float32)
        row[script[said % len(script)]] = 9
        return row

    def _begins(self, history: Sequence[int], prompt: tuple[int, ...]) -> bool:
        return tuple(history[: len(prompt)]) == prompt
