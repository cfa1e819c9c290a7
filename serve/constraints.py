"""What a request says about the form of its output, as a constraint of tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any
from typing import Literal

from mkc.errors import RequestFieldError
from mkc.runtime.request import TokenConstraint
from mkc.runtime.text import ChannelFormat
from mkc.runtime.text import Prompt
from serve.channel_grammar import channel_grammar
from serve.forms import Form
from serve.forms import calls_of
from serve.forms import content_of
from serve.grammar import Rules
from serve.grammar import constraint
from serve.model import ServedModel
from serve.schemas.base import GuidedFields
from serve.schemas.base import SamplingFields
from serve.schemas.chat import NamedTool
from serve.schemas.chat import Tool
from serve.tag_grammar import tag_grammar
from serve.vocabulary import vocabulary

type MakeConstraint = Callable[[], TokenConstraint | None]  # one for each sequence


def chat_constraint(
    model: ServedModel,
    prompt: Prompt,
    fields: SamplingFields,
    *,
    response_format: Mapping[str, Any] | None,
    guided: GuidedFields | None = None,
    tools: Sequence[Tool] = (),
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None,
    parallel: bool | None = None,
) -> MakeConstraint:
    """What makes the constraint of each sequence of a chat.

    Args:
      prompt: says whether a thought comes first, which is free.

    Raises:
      RequestFieldError: a form that cannot be kept to.
    """
    words = partial(vocabulary, model.tokenizer, model.backend.vocab)
    content = content_of(response_format, guided or GuidedFields(), words)
    calls = calls_of(tools, tool_choice, parallel, with_content=content is not None)
    form = Form(content=content, calls=calls)
    if form.is_free:
        return lambda: None
    markup = model.chat.markup
    grammar = (
        channel_grammar(markup, model.tokenizer, form, prompt)
        if isinstance(markup, ChannelFormat)
        else tag_grammar(markup, form, prompt)
    )
    return _maker(grammar, model, fields, field="tools" if calls else "response_format")


def text_constraint(
    model: ServedModel, fields: SamplingFields, guided: GuidedFields
) -> MakeConstraint:
    """The same for text that is continued, all of which is the answer."""
    words = partial(vocabulary, model.tokenizer, model.backend.vocab)
    content = content_of(None, guided, words)
    if content is None:
        return lambda: None
    rules = Rules()
    return _maker(rules.text(rules.part(content)), model, fields, field="structured_outputs")


def _maker(
    grammar: str, model: ServedModel, fields: SamplingFields, *, field: str
) -> MakeConstraint:
    for name in ("ignore_eos", "min_tokens"):
        if getattr(fields, name):
            raise RequestFieldError(
                field=name,
                problem="is there together with a form, which says itself where the output ends",
                expected="one of them",
            )
    words = vocabulary(model.tokenizer, model.backend.vocab)
    make = partial(constraint, grammar, words)
    try:
        make()
    except ValueError as error:
        raise RequestFieldError(
            field=field, problem=f"cannot be kept to ({error})", expected="simpler schemas"
        ) from error
    return make
