"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated
from typing import Any
from typing import Literal
from typing import Self

from pydantic import Field
from pydantic import model_validator

from serve.schemas.base import Answer
from serve.schemas.base import Body
from serve.schemas.base import GenerationFields
from serve.schemas.base import Usage
from serve.schemas.base import top_logprobs_field
from serve.schemas.completions import FinishName


class FunctionCall(Body):
    """A call that the model made before; the arguments are JSON text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCallMessage(Body):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message. Fields of answers of this server may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[dict[str, Any]] | None, Field(description="Text, or parts of type text.")
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallMessage] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content, which only an assistant's message may leave out")
        return self


class Function(Body):
    """What the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of the only type that there is."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(GenerationFields):
    """Answers messages."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, top_logprobs_field()] = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    echo: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    modalities: list[Literal["text"]] | None = None


class TopLogprob(Answer):
    """A token that could have been chosen; `bytes` is its UTF-8, perhaps of part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TopLogprob):
    """The token that was chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per generated token."""

    content: list[ChosenLogprob]


class CalledFunction(Answer):
    """In a stream the name comes first, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class CalledTool(Answer):
    """A call, or a piece of one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Answer):
    """The answer, or what is new of it. Thoughts come under both names that clients know."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: str | int | None = None


class ChatChunkChoice(Answer):
    """What is new of one answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None
    stop_reason: str | int | None = None


class ChatCompletion(Answer):
    """All answers."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Answer):
    """A piece of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
