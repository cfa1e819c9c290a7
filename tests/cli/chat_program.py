"""`mkc chat` with a model that always says the same, slowly; prints what it was asked at the end.

python -m tests.cli.chat_program CHECKPOINT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from mkc.cli import generation
from mkc.cli.main import app
from mkc.runtime.sampling import Array
from tests.cli.answers import CONTEXT
from tests.cli.answers import Answers

ANSWER = "so\n</think>\n\none two three four five six seven<|end|>"
SECONDS = 0.02  # per token
ASKED, SAID = "Xmat", "three"  # after this, in the answer to that, a person has time to interrupt
SLOW_SECONDS = 2.0


class SlowAnswers(Answers):
    """Gives a person the time to interrupt the answer to one question."""

    def say(self, history: Sequence[int]) -> Array:
        _, asked, answer = self._tokenizer.decode(history).rpartition(ASKED)
        slow = bool(asked) and SAID in answer
        sleep(SLOW_SECONDS if slow else SECONDS)
        return super().say(history)


def main() -> None:
    """Chats."""
    folder = Path(sys.argv[1])
    answers = SlowAnswers(folder, ANSWER)
    setattr(generation, "open_backend", answers.opened)  # noqa: B010 type checkers object
    app(["chat", str(folder), "--context", str(CONTEXT)], standalone_mode=False)
    print("asked:", answers.prompts)


if __name__ == "__main__":
    main()
