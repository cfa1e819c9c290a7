"""What the small model answers: conversations in its own words, for a drafter to learn from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from random import Random

import numpy as np

from examples.tiny_family import TINY
from examples.tiny_family import Family
from examples.tiny_tasks import Exchange
from examples.tiny_text import THINKING
from examples.tiny_text import Rows
from examples.tiny_text import Teacher
from mkc.runtime.backends import open_reference
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request

SLOTS = 32  # conversations at once
ROUNDS = 8  # tokens of one launch
SHORTEST = 8  # tokens that an answer needs room for


@dataclass(kw_only=True)
class Conversation:
    """One that goes on until it is full.

    Attributes:
      parts: what is still to come.
      ids: all tokens so far.
      answers: task, and places in `ids` from the first token of an answer to behind its last one.
    """

    rng: Random
    parts: Iterator[Sequence[int] | Exchange]
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[str, int, int]] = field(default_factory=list)


class Speaker:
    """The model of a folder, which answers greedily as it does anywhere else."""

    def __init__(self, folder: Path, family: Family = TINY, *, length: int) -> None:
        """
        Args:
          length: most tokens of a conversation.
        """
        self.teacher = Teacher(folder, family.markup)
        self.length = length
        checkpoint = Checkpoint.open(folder)
        graph = family.model.trace(checkpoint.config, batch=SLOTS, context=length)
        backend = open_reference(graph, checkpoint, rounds_per_launch=ROUNDS).backend
        self._generator = Generator(backend, tokenizer=self.teacher.tokenizer)
        between = self.teacher.tokenizer.encode(family.markup.between, allow_special=False)
        self._between = list(between)

    def rows(
        self, name: str, *, rows: int, weights: Mapping[str, float], held_out: bool = False
    ) -> Rows:
        """Conversations, a row each: the questions are drawn, the answers are the model's.

        Args:
          name: decides what is drawn.
          weights: how often each task comes, in proportion.
          held_out: which side of the split the items are from.
        """
        found = []
        for number in range(rows):
            rng = Random(f"{name}/{number}")
            parts = self.teacher.conversation(rng, weights, held_out=held_out)
            found.append(Conversation(rng=rng, parts=parts))
        going = found
        while going:
            going = self._answer([(one, *self._ask(one)) for one in going])
        return self._as_rows(found)

    def _ask(self, one: Conversation) -> tuple[str, list[int]]:
        """Task of the next question, and the conversation with it up to where its answer begins."""
        ids = list(one.ids)
        part = next(one.parts)
        if not isinstance(part, Exchange):
            ids += part
            part = next(one.parts)
        assert isinstance(part, Exchange), "a heading behind a heading"
        thinking = one.rng.random() < THINKING
        return part.task, [*ids, *self.teacher.question_ids(part, thinking=thinking)]

    def _answer(self, asked: list[tuple[Conversation, str, list[int]]]) -> list[Conversation]:
        """Adds the answers; the conversations that may go on."""
        asked = [one for one in asked if len(one[2]) + SHORTEST <= self.length]
        requests = [Request(tokens=prompt) for _, _, prompt in asked]
        said: dict[int, list[int]] = {}
        ended: set[int] = set()
        first: int | None = None
        for delta in self._generator.run(requests):
            first = delta.sequence if first is None else min(first, delta.sequence)
            said.setdefault(delta.sequence, []).extend(delta.tokens)
            if delta.finish is not None and delta.finish.reason is FinishReason.STOP:
                ended.add(delta.sequence)
        going = []
        for number, (one, task, prompt) in enumerate(asked, first or 0):
            if number in ended:
                one.ids = [*prompt, *said[number]]
                one.answers.append((task, len(prompt), len(one.ids)))
                one.ids += self._between
                going.append(one)
        return going

    def _as_rows(self, conversations: list[Conversation]) -> Rows:
        shape = len(conversations), self.length
        tokens = np.full(shape, self.teacher.special(self.teacher.markup.padding), np.int32)
        learned = np.zeros(shape, np.float32)
        tasks = []
        for row, one in enumerate(conversations):
            ids = one.ids[: one.answers[-1][2]] if one.answers else []
            tokens[row, : len(ids)] = ids
            for task, start, end in one.answers:
                learned[row, start:end] = 1
                tasks.append((task, row, start, end))
        return Rows(tokens=tokens, learned=learned, tasks=tuple(tasks))


def save_rows(path: Path, rows: Rows) -> None:
    """Writes rows in one move."""
    unfinished = path.with_suffix(".unfinished.npz")
    names = np.array([task for task, *_ in rows.tasks])
    places = np.array([place for _, *place in rows.tasks], np.int32)
    np.savez_compressed(
        unfinished, tokens=rows.tokens, learned=rows.learned, names=names, places=places
    )
    os.replace(unfinished, path)


def load_rows(path: Path) -> Rows:
    with np.load(path) as found:
        tasks = [
            (str(name), *place)
            for name, place in zip(found["names"], found["places"].tolist(), strict=True)
        ]
        return Rows(tokens=found["tokens"], learned=found["learned"], tasks=tuple(tasks))
