"""`/v1/completions`."""

from __future__ import annotations

from typing import Annotated
from typing import Literal

from pydantic import Field

from serve.schemas.base import Answer
from serve.schemas.base import GenerationFields
from serve.schemas.base import Usage
from serve.schemas.base import top_logprobs_field

MOST_PROMPTS = 1024

type TokenIds = Annotated[list[int], Field(min_length=1)]
type FinishName = Literal["stop", "length", "tool_calls"]


class CompletionRequest(GenerationFields):
    """Continues prompts."""

    prompt: Annotated[
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)],
        Field(description="Text or token ids, or a list of either."),
    ]
    best_of: Annotated[int | None, Field(ge=1, description="The same as n, or left out.")] = None
    echo: bool | None = None
    allow_special_tokens: Annotated[
        bool | None,
        Field(description="True: names of special tokens in the prompt are these tokens."),
    ] = None
    logprobs: Annotated[int | None, top_logprobs_field()] = None


class CompletionLogprobs(Answer):
    """One entry per generated token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Answer):
    """One output. `stop_reason` is the stop string or stop id of the request that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    stop_reason: str | int | None = None


class Completion(Answer):
    """An answer, and each chunk of one that is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
