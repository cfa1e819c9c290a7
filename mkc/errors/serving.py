"""Serving: requests that a server refuses, and servers that cannot start."""

from __future__ import annotations

from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import sentence


class RequestFieldError(MkcError):
    """A field of a request that is wrong, or that would be ignored if it were accepted."""

    code: ClassVar[str] = "E380"

    def __init__(self, *, field: str, problem: str, expected: str, hint: str = "") -> None:
        self.field = field
        self._rest = (problem, expected, hint)
        advice = hint or "Correct the field, or leave it out"
        super().__init__(f"field '{field}' {problem}; expected {expected}. {sentence(advice)}")

    def of(self, field: str) -> RequestFieldError:
        """The same about a field that has another name in the request."""
        problem, expected, hint = self._rest
        return RequestFieldError(field=field, problem=problem, expected=expected, hint=hint)


class RequestBodyError(MkcError):
    """A body that is no JSON object, or too large."""

    code: ClassVar[str] = "E381"

    def __init__(self, *, problem: str, expected: str) -> None:
        super().__init__(f"the request body {problem}; expected {expected}. Correct the request.")


class ServedModelError(MkcError):
    """A request for a model that this server does not have."""

    code: ClassVar[str] = "E382"

    def __init__(self, *, name: str, served: str) -> None:
        super().__init__(
            f"model '{name}' is not served here; expected '{served}'. "
            f"Ask /v1/models for the name, or start another server for the other model."
        )


class ApiKeyError(MkcError):
    """A request without a key that is known."""

    code: ClassVar[str] = "E383"

    def __init__(self, *, problem: str) -> None:
        super().__init__(
            f"{problem}; expected the header 'Authorization: Bearer KEY' with a key of this "
            f"server. Ask whoever runs the server for one."
        )


class QueueFullError(MkcError):
    """More requests than the server keeps waiting."""

    code: ClassVar[str] = "E384"

    def __init__(self, *, waiting: int, limit: int, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"{waiting} sequences are waiting, and this request would make them more than "
            f"{limit}; expected room in the queue. Try again in {retry_after} s."
        )


class NotServingError(MkcError):
    """A server that is loading or ending."""

    code: ClassVar[str] = "E385"

    def __init__(self, *, state: str, retry_after: int) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"the server is {state}; expected it to be ready. Look at /health, and try again in "
            f"{retry_after} s."
        )


class EngineError(MkcError):
    """What runs the model has failed while it worked on a request."""

    code: ClassVar[str] = "E386"

    def __init__(self, *, problem: str) -> None:
        super().__init__(
            f"the model's engine has failed ({problem}); expected it to finish the request. "
            f"The request itself may be fine: try it again, and see the log of the server."
        )


class RequestTimeoutError(MkcError):
    """A request that took longer than the server allows."""

    code: ClassVar[str] = "E387"

    def __init__(self, *, seconds: float, what: str) -> None:
        super().__init__(
            f"{what} took longer than {seconds:g} s; expected it within this time. Ask for fewer "
            f"tokens, or start the server with another --request-timeout."
        )


class ServerOptionError(MkcError):
    """Options of `mkc serve` that contradict each other, or name what is not there."""

    code: ClassVar[str] = "E388"

    def __init__(self, *, problem: str, expected: str, hint: str) -> None:
        super().__init__(f"{problem}; expected {expected}. {sentence(hint)}")


class BootCheckError(MkcError):
    """What runs does not do what was asked for."""

    code: ClassVar[str] = "E389"

    def __init__(self, *, problem: str, expected: str, hint: str) -> None:
        super().__init__(f"boot check: {problem}; expected {expected}. {sentence(hint)}")
