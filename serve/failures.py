"""From an error to the answer that clients of OpenAI's interface understand."""

from __future__ import annotations

from mkc.errors import ApiKeyError
from mkc.errors import ChatMessageError
from mkc.errors import ChatOptionError
from mkc.errors import ChatTemplateError
from mkc.errors import EngineError
from mkc.errors import GenerationOptionError
from mkc.errors import MkcError
from mkc.errors import NotFiniteLogitsError
from mkc.errors import NotServingError
from mkc.errors import PromptLengthError
from mkc.errors import PromptTokenError
from mkc.errors import QueueFullError
from mkc.errors import RequestFieldError
from mkc.errors import RequestTimeoutError
from mkc.errors import ServedModelError
from mkc.errors import StopStringError
from serve.schemas.base import ErrorAnswer
from serve.schemas.base import ErrorInfo

TEMPLATE_WORDS = "chat template:"  # how the message goes on behind the place of the file
BAD_REQUEST = 400
INTERNAL = 500
# Status, and the code where clients know one; other errors are bad requests with their own code.
STATUS: dict[type[MkcError], tuple[int, str | None]] = {
    ApiKeyError: (401, "invalid_api_key"),
    EngineError: (INTERNAL, None),
    NotFiniteLogitsError: (INTERNAL, None),
    NotServingError: (503, None),
    PromptLengthError: (BAD_REQUEST, "context_length_exceeded"),
    QueueFullError: (429, "rate_limit_exceeded"),
    RequestTimeoutError: (408, None),
    ServedModelError: (404, "model_not_found"),
}
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# What an option of the generator is called in a request.
FIELDS = {"alternatives": "logprobs", "effort": "reasoning_effort", "thinking": "enable_thinking"}


def status_of(error: MkcError) -> int:
    """The HTTP status of an error."""
    return STATUS.get(type(error), (BAD_REQUEST, None))[0]


def headers_of(error: MkcError) -> dict[str, str]:
    """Headers that belong to an error."""
    if isinstance(error, QueueFullError | NotServingError):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, ApiKeyError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def answer_of(error: MkcError) -> ErrorAnswer:
    """The body that tells of an error."""
    status = status_of(error)
    code = STATUS.get(type(error), (status, None))[1] or error.code
    return failure(status, _shown(error), param=_field(error), code=code)


def failure(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorAnswer:
    """The body of any answer with an error status."""
    kind = TYPES.get(status, "invalid_request_error" if status < INTERNAL else "server_error")
    return ErrorAnswer(error=ErrorInfo(message=message, type=kind, param=param, code=code))


def _shown(error: MkcError) -> str:
    """The message, without the place of a file on the server."""
    if isinstance(error, ChatTemplateError):
        return error.message[error.message.index(TEMPLATE_WORDS) :]
    return error.message


def _field(error: MkcError) -> str | None:
    """The field of the request that an error is about."""
    match error:
        case RequestFieldError():
            return error.field
        case GenerationOptionError() | ChatOptionError():
            return FIELDS.get(error.option, error.option)
        case ChatMessageError():
            return error.where
        case ChatTemplateError():
            return "messages"
        case PromptLengthError() | PromptTokenError():
            return "prompt"
        case StopStringError():
            return "stop"
        case ServedModelError():
            return "model"
    return None
