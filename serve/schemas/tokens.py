"""`/tokenize` and `/detokenize`, `/v1/models`, and what a server says of itself."""

from __future__ import annotations

from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import Field

from serve.schemas.base import Answer
from serve.schemas.base import Body
from serve.schemas.chat import Message
from serve.schemas.chat import Tool


class TokenizeRequest(Body):
    """A prompt, or messages as a chat completion would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, Field(min_length=1)] = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="Put the tokenizer's prefix in front of a prompt.")
    ] = None
    allow_special_tokens: Annotated[
        bool | None,
        Field(description="True: names of special tokens in the prompt are these tokens."),
    ] = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class Tokens(Answer):
    """Attributes:
    token_strs: the text of each token, where it was asked for.
    """

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class Text(Answer):
    """The text of the ids; special tokens appear by name."""

    prompt: str


class Model(Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(Answer):
    """All names, the first one being the one that answers have."""

    object: Literal["list"]
    data: list[Model]


class Health(Answer):
    """Attributes:
    stage: what is being done while loading.
    seconds: how long the current state has lasted, while loading.
    """

    status: str
    stage: str | None = None
    seconds: float | None = None


class Version(Answer):
    """What runs; fields about the model are there once it is loaded.

    Attributes:
      hbm_bytes, vmem_bytes: planned for each device of a kernel; null without one.
      pictures: files under `/static/` that show the plan of the kernel.
    """

    version: str
    state: str
    backend: str | None = None
    kernel: str | None = None
    scheme: str | None = None
    fingerprint: str | None = None
    target: str | None = None
    description: str | None = None
    hbm_bytes: int | None = None
    vmem_bytes: int | None = None
    pictures: list[str] | None = None


class Load(Answer):
    """Queue and slots; `round_ms` is measured, `predicted_round_ms` is not.

    Attributes:
      rounds: that have run since the start.
      acceptance: rounds of sequences that accepted 0, 1, ... drafts.
    """

    state: str
    running: int
    waiting: int
    slots: int
    queue_size: int
    kv_cache_usage: float
    rounds: int
    round_ms: float
    predicted_round_ms: float | None
    acceptance: list[int]
