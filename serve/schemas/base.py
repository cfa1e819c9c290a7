"""What all bodies have in common, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from typing import Any
from typing import Literal

from pydantic import BaseModel
from pydantic import ConfigDict
from pydantic import Field
from pydantic import ValidationError
from pydantic import model_validator
from pydantic_core import ErrorDetails
from pydantic_core import from_json

from mkc.errors import RequestBodyError
from mkc.errors import RequestFieldError
from mkc.runtime.sampling import MOST_ALTERNATIVES

MOST_SEQUENCES = 128
MOST_STOPS = 16
UNKNOWN = "extra_forbidden"  # pydantic's name for a field that is not declared


class Body(BaseModel):
    """A request, or a part of one. Numbers are numbers, and every field is one that is honoured.

    A field that is null counts as left out, whether it is known or not.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Answer(BaseModel):
    """A response; fields that were not set are left out."""

    model_config = ConfigDict(extra="forbid")

    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class StreamOptions(Body):
    """When usage is sent; see the fields."""

    include_usage: Annotated[
        bool | None, Field(description="Send the usage in a last chunk without choices.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Field(description="Also send the usage so far in every chunk.")
    ] = None
    include_obfuscation: Literal[False] | None = None


class Metadata(Body):
    """Fields that are accepted and change nothing."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class AsItIs(Body):
    """Fields of other servers, at the value that says what this one does in any case."""

    use_beam_search: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None


class SamplingFields(Body):
    """How tokens are chosen, and what ends an output. The defaults are the checkpoint's."""

    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, description="0 or -1 keep all tokens.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=100)] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=MOST_STOPS)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, Field(ge=0)] = None
    draft: Annotated[
        bool | None, Field(description="False: decode this request without drafts.")
    ] = None


class StructuredOutputs(Body):
    """The form of the answer; at most one of them."""

    json_schema: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(min_length=1)] = None
    grammar: Annotated[str | None, Field(description="In the notation of Lark or GBNF.")] = None


class GuidedFields(Body):
    """The form of the answer, under the names that vLLM has had for it."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, Field(min_length=1)] = None
    guided_grammar: str | None = None


class GenerationFields(SamplingFields, GuidedFields, Metadata, AsItIs):
    """What completions and chat completions share."""

    model: str | None = None
    n: Annotated[int | None, Field(ge=1, le=MOST_SEQUENCES)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokenDetails(Answer):
    """Attributes:
    cached_tokens: of the prompt, that came from the prefix cache.
    """

    cached_tokens: int


class DraftUsage(Answer):
    """Attributes:
    rounds: rounds that the sequences took part in.
    drafted, accepted: tokens that were proposed in them, and those that were emitted.
    """

    rounds: int
    drafted: int
    accepted: int


class Usage(Answer):
    """Tokens of a request: the prompt once, the outputs all together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails | None = None
    draft: DraftUsage | None = None


class ErrorInfo(Answer):
    """Attributes:
    param: the field that is wrong, if one is.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every answer with an error status."""

    error: ErrorInfo


def top_logprobs_field() -> Any:
    """The range of a number of alternatives."""
    return Field(ge=0, le=MOST_ALTERNATIVES)


def read_object(data: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
      RequestBodyError: it is none.
    """
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestBodyError(problem=f"is no JSON ({error})", expected="an object") from error
    if not isinstance(value, dict):
        raise RequestBodyError(problem=f"is {_kind(value)}", expected="a JSON object")
    return value


def read_body[T: Body](
    kind: type[T], value: Mapping[str, Any], *, lenient: bool
) -> tuple[T, list[str]]:
    """A request, and the fields that were ignored.

    Args:
      lenient: ignore unknown fields instead of refusing them.

    Raises:
      RequestFieldError: names the field.
    """
    given = dict(value)
    ignored: list[str] = []
    while True:
        try:
            return kind.model_validate(given), ignored
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
        unknown = [one for one in details if one["type"] == UNKNOWN and len(one["loc"]) == 1]
        if not lenient or not unknown:
            raise _field_error(details)
        for one in unknown:
            name = str(one["loc"][0])
            del given[name]
            ignored.append(name)


def _field_error(details: list[ErrorDetails]) -> RequestFieldError:
    """The first unknown field, or else what is wrong first, as exactly as that can be said."""
    same = [one for one in details if one["loc"][:1] == details[0]["loc"][:1]]
    deepest = max(same, key=lambda one: _depth(_place(one["loc"])))  # of the members of a union
    first = next((one for one in details if one["type"] == UNKNOWN), deepest)
    field = _place(first["loc"])
    if first["type"] == UNKNOWN:
        return RequestFieldError(
            field=field,
            problem="is not supported here",
            expected="only fields of this endpoint's description (see /openapi.json)",
            hint="Leave it out; a server with --lenient ignores it and says so in a header",
        )
    if first["type"] == "missing":
        return RequestFieldError(field=field, problem="is missing", expected="a value")
    wanted = [one["msg"] for one in details if _place(one["loc"]) == field]
    return RequestFieldError(
        field=field,
        problem="has a value of the wrong kind or range",
        expected=" or ".join(dict.fromkeys(map(_wanted, wanted))),
    )


def _place(location: tuple[int | str, ...]) -> str:
    """`messages[0].role`. Names of a union's members, which pydantic adds, are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _MEMBERS:
            text += f".{part}" if text else part
    return text


def _depth(place: str) -> int:
    return place.count(".") + place.count("[")


_MEMBERS = frozenset({"str", "int", "list"})  # others are classes: no field is in upper case


def _wanted(message: str) -> str:
    """What pydantic's sentence says was expected."""
    text = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a truth value"}.get(type(value), "a number")
