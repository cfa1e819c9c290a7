"""Tokenizers, chat templates and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import sentence


class TokenizerFileError(MkcError):
    """A file of the tokenizer is missing, unreadable or contradicts another."""

    code: ClassVar[str] = "E320"

    def __init__(self, *, path: Place, problem: str, expected: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected {expected}. "
            f"Use the tokenizer files that came with the checkpoint."
        )


class TokenizerVocabularyError(MkcError):
    """The tokenizer has tokens for which the model has no embedding."""

    code: ClassVar[str] = "E321"

    def __init__(self, *, path: Place, token: str, token_id: int, vocab: int) -> None:
        super().__init__(
            f"{path}: token {token!r} has id {token_id}, and the model's vocabulary ends at "
            f"{vocab - 1}; expected a tokenizer whose ids are all below {vocab}. "
            f"Use the tokenizer that came with the checkpoint."
        )


class UnsupportedTokenizerError(MkcError):
    """A kind of tokenizer that mkc cannot run exactly."""

    code: ClassVar[str] = "E322"

    def __init__(self, *, path: Place, part: str, got: object, supported: str) -> None:
        super().__init__(
            f"{path}: {part} is {got!r}, which mkc does not support; expected {supported}. "
            f"Use a checkpoint with such a tokenizer."
        )


class ChatTemplateError(MkcError):
    """The chat template does not parse, or refuses the messages."""

    code: ClassVar[str] = "E323"

    def __init__(self, *, path: Place, line: int | None, problem: str, hint: str = "") -> None:
        self.line = line
        where = f"{path}:{line}" if line is not None else f"{path}"
        advice = hint or "Correct the messages, or pass another template with --chat-template"
        super().__init__(f"{where}: {sentence(f'chat template: {problem}')} {sentence(advice)}")


class ChatMessageError(MkcError):
    """A chat message that no template could render."""

    code: ClassVar[str] = "E324"

    def __init__(self, *, where: Place, problem: str, expected: str) -> None:
        self.where = str(where)
        super().__init__(f"{where}: {problem}; expected {expected}. Correct the message.")


class TextFormatError(MkcError):
    """The description of a text format is wrong, or does not fit the tokenizer."""

    code: ClassVar[str] = "E325"

    def __init__(self, *, path: Place, key: str, problem: str, expected: str) -> None:
        self.key = key
        super().__init__(
            f"{path}: key '{key}' {problem}; expected {expected}. "
            f"Correct the description; docs/tokenizers.md lists its keys."
        )


class ChatOptionError(MkcError):
    """A chat option with a value that the model's format does not have."""

    code: ClassVar[str] = "E326"

    def __init__(self, *, option: str, got: object, expected: str) -> None:
        self.option = option
        super().__init__(
            f"chat option '{option}' is {got!r}; expected {expected}. "
            f"Choose one of these values, or leave the option out."
        )


class StopStringError(MkcError):
    """A stop string of no characters."""

    code: ClassVar[str] = "E327"

    def __init__(self, *, strings: Sequence[str]) -> None:
        super().__init__(
            f"stop strings {list(strings)!r}: one of them is empty; expected at least one "
            f"character in each, since every text ends with nothing. Remove the empty one."
        )
