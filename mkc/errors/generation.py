"""Requests for text that cannot be served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import sentence


class PromptLengthError(MkcError):
    """A prompt, or what was asked for beyond it, that the context does not hold."""

    code: ClassVar[str] = "E330"

    def __init__(self, *, prompt: int, context: int, max_tokens: int | None = None) -> None:
        self.prompt = prompt
        self.context = context
        wanted = f" and {max_tokens} tokens to generate" if max_tokens is not None else ""
        change = "Ask for fewer tokens" if max_tokens is not None else "Shorten the prompt"
        super().__init__(
            f"the prompt has {prompt} tokens{wanted}, the context {context} positions; expected a "
            f"prompt of at most {context - 1} tokens and everything together to fit the context. "
            f"{change}, or choose a larger --context."
        )


class PromptTokenError(MkcError):
    """A prompt without tokens, or with one that the model does not have."""

    code: ClassVar[str] = "E331"

    def __init__(self, *, problem: str, vocab: int) -> None:
        super().__init__(
            f"the prompt {problem}; expected at least one token id, all from 0 to {vocab - 1}. "
            f"Use the tokenizer that came with the checkpoint."
        )


class GenerationOptionError(MkcError):
    """An option of a request that is out of its range."""

    code: ClassVar[str] = "E332"

    def __init__(self, *, option: str, got: object, expected: str) -> None:
        self.option = option
        super().__init__(
            f"generation option '{option}' is {got!r}; expected {expected}. "
            f"Correct the value, or leave the option out."
        )


class NoTokenAllowedError(MkcError):
    """Allowed tokens, biases and stop rules together leave nothing to choose."""

    code: ClassVar[str] = "E333"

    def __init__(self, *, position: int) -> None:
        super().__init__(
            f"at position {position} no token is allowed; expected at least one that neither the "
            f"mask of allowed tokens nor a logit bias of minus infinity removes. "
            f"Allow more tokens, or let the generation end before."
        )


class NotFiniteLogitsError(MkcError):
    """The model's logits are not numbers."""

    code: ClassVar[str] = "E334"

    def __init__(self, *, position: int) -> None:
        super().__init__(
            f"at position {position} the model's logits are not numbers (NaN or infinity); "
            f"expected finite ones. Look for damaged weights: mkc pack names tensors with a NaN or "
            f"an infinity."
        )


class BackendError(MkcError):
    """A backend that this machine cannot run."""

    code: ClassVar[str] = "E335"

    def __init__(self, *, backend: str, problem: str, hint: str) -> None:
        super().__init__(f"backend '{backend}': {problem}. {sentence(hint)}")


class BackendOptionError(MkcError):
    """Options of a kernel for a backend that has none."""

    code: ClassVar[str] = "E336"

    def __init__(self, *, backend: str, options: Iterable[str]) -> None:
        super().__init__(
            f"{', '.join(options)} with backend '{backend}', which runs no kernel; expected "
            f"--backend tpu or --backend interpret. Choose one of them, or leave the options out."
        )
