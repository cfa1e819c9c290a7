"""From the fields of a request to sequences for the engine."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mkc.errors import ChatOptionError
from mkc.errors import RequestFieldError
from mkc.errors import ServedModelError
from mkc.errors import StopStringError
from mkc.runtime.request import Request
from mkc.runtime.sampling import SEED_BITS
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import Prompt
from mkc.runtime.text import StopConditions
from serve.constraints import MakeConstraint
from serve.model import ServedModel
from serve.schemas.base import SamplingFields
from serve.schemas.chat import Message
from serve.schemas.chat import Tool

DIRECT = (  # fields that are the parameters of the same name
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
NO_EFFORT = "none"


def check_model(model: ServedModel, name: str | None) -> None:
    """Raises `ServedModelError` unless a request names what is served, or nothing."""
    if name is not None and name not in (model.name, *model.aliases):
        raise ServedModelError(name=name, served=model.name)


def sampling_of(
    fields: SamplingFields, model: ServedModel, *, alternatives: int | None
) -> SamplingParams:
    """How the tokens of a request are chosen.

    Args:
      alternatives: see `SamplingParams`.

    Raises:
      RequestFieldError: a token of the bias is none.
      GenerationOptionError: a number is out of its range.
    """
    changes: dict[str, Any] = {
        name: value for name in DIRECT if (value := getattr(fields, name)) is not None
    }
    if fields.top_k is not None:
        changes["top_k"] = max(0, fields.top_k)
    if fields.seed is not None:
        changes["seed"] = fields.seed % (1 << SEED_BITS)
    if fields.logit_bias:
        changes["logit_bias"] = _biases(fields.logit_bias, model.backend.vocab)
    return replace(model.sampling, alternatives=alternatives, **changes)


def stops_of(fields: SamplingFields, model: ServedModel) -> StopConditions:
    """What ends the outputs of a request.

    Raises:
      StopStringError: one is empty.
      RequestFieldError: an id is no token.
    """
    given = fields.stop if fields.stop is not None else []
    strings = (given,) if isinstance(given, str) else tuple(given)
    if not all(strings):
        raise StopStringError(strings=strings)
    ids = frozenset(fields.stop_token_ids or ())
    _check_ids(ids, "stop_token_ids", model.backend.vocab)
    return StopConditions(
        strings=strings,
        ids=ids,
        include_string=bool(fields.include_stop_str_in_output),
        ignore_checkpoint=bool(fields.ignore_eos),
    )


def sequences(
    fields: SamplingFields,
    model: ServedModel,
    prompt: Prompt,
    *,
    count: int,
    max_tokens: int | None,
    alternatives: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    calls_first: bool = False,
    is_chat: bool = True,
    constraint: MakeConstraint = lambda: None,
) -> list[Request]:
    """`count` sequences with the same prompt; of a seed each has its own successor.

    Args:
      tools: what the model may call, None for nothing.
      calls_first: what looks like a call behind some content is content.
      is_chat: the prompt is that of a chat.

    Raises:
      MkcError: a field is wrong.
    """
    sampling = sampling_of(fields, model, alternatives=alternatives)
    stops = stops_of(fields, model)
    found = []
    for number in range(count):
        seed = sampling.seed
        if seed is not None:
            seed = (seed + number) % (1 << SEED_BITS)
        output = (
            model.chat.output(prompt, tools=tools, stops=stops, calls_first=calls_first)
            if is_chat
            else model.chat.plain_output(prompt.ids, stops=stops)
        )
        found.append(
            Request(
                tokens=prompt.ids,
                sampling=replace(sampling, seed=seed),
                max_tokens=max_tokens,
                min_tokens=fields.min_tokens or 0,
                stop_ids=stops.ids,
                ignore_eos=stops.ignore_checkpoint,
                output=output,
                constraint=constraint(),
                draft=fields.draft is not False,
            )
        )
    return found


def text_prompt(model: ServedModel, text: str, *, special: bool, prefix: bool = True) -> Prompt:
    """Text that is continued; what looks like a special token is text, unless `special`."""
    first = model.tokenizer.prefix_ids if prefix else ()
    ids = (*first, *model.tokenizer.encode(text, allow_special=special))
    return Prompt(ids=ids, text=text, opens_reasoning=False)


def id_prompt(model: ServedModel, ids: Sequence[int], field: str) -> Prompt:
    """Token ids that are continued. Raises `RequestFieldError` when one is no token."""
    _check_ids(ids, field, model.backend.vocab)
    return Prompt(ids=tuple(ids), text="", opens_reasoning=False)


def chat_prompt(
    model: ServedModel,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    tool_choice: str = "auto",
    effort: str | None = None,
    options: Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Messages as the model reads them.

    Args:
      options: what the template understands besides.

    Raises:
      ChatMessageError, ChatOptionError, ChatTemplateError: what is wrong with them.
    """
    rest = dict(options or {})
    thinking = next(
        (rest.pop(name) for name in ("enable_thinking", "thinking") if name in rest), None
    )
    if thinking is not None and not isinstance(thinking, bool):
        raise ChatOptionError(option="enable_thinking", got=thinking, expected="true or false")
    if effort == NO_EFFORT and thinking is None:
        thinking = False
    return model.chat.encode(
        ChatRequest(
            messages=[one.model_dump(exclude_none=True) for one in messages],
            tools=[one.model_dump(exclude_none=True) for one in tools],
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            effort=effort,
            tool_choice=tool_choice,
            response_format=response_format,
            options=rest,
        )
    )


def _biases(given: Mapping[str, float], vocab: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for text, bias in given.items():
        if not (text.isascii() and text.isdecimal() and len(text) < len(str(vocab)) + 1):
            raise RequestFieldError(
                field=f"logit_bias.{text[:20]}",
                problem="is no token",
                expected=f"token ids from 0 to {vocab - 1}, written in digits",
            )
        found[int(text)] = bias
    _check_ids(found, "logit_bias", vocab)
    return found


def _check_ids(ids: Iterable[int], field: str, vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise RequestFieldError(
                field=field, problem=f"has the id {token}", expected=f"ids from 0 to {vocab - 1}"
            )
