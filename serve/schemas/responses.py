"""`/v1/responses`."""

from __future__ import annotations

from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import Field

from serve.schemas.base import Answer
from serve.schemas.base import Body
from serve.schemas.base import DraftUsage
from serve.schemas.base import Metadata
from serve.schemas.base import SamplingFields
from serve.schemas.base import TokenDetails

type Status = Literal["in_progress", "completed", "incomplete", "failed"]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ForcedFunction(Body):
    """The function that has to be called."""

    type: Literal["function"]
    name: str


class TextOptions(Body):
    """The form of the answer: type text, json_object or json_schema."""

    format: dict[str, Any] | None = None


class ReasoningOptions(Body):
    """How much the model thinks."""

    effort: str | None = None


class ResponsesRequest(SamplingFields, Metadata):
    """Answers an input. Nothing is kept: an input holds the whole conversation."""

    input: Annotated[
        str | Annotated[list[dict[str, Any]], Field(min_length=1)],
        Field(description="Text, or messages, calls and results of functions."),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ForcedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[Any] | None, Field(max_length=0)] = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(Answer):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class ReasoningText(Answer):
    """Text of a thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(Answer):
    """The answer itself."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class ReasoningItem(Answer):
    """A thought."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A call; `arguments` is JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


type Item = OutputMessage | ReasoningItem | FunctionCallItem


class OutputTokenDetails(Answer):
    """Always 0: thoughts are not counted apart."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of the request."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int
    draft: DraftUsage | None


class Incomplete(Answer):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    """What went wrong in a stream."""

    code: str
    message: str


class ResponseObject(Answer):
    """An answer, whole or under way."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: Any
    tools: list[Any]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"
    store: bool = False
    user: str | None = None

    def json_bytes(self) -> bytes:
        """All fields: clients expect each of them to be there."""
        return self.model_dump_json().encode()
