"""Chat templates: the Jinja program of a checkpoint, run in a sandbox."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from datetime import datetime
from json import dumps
from pathlib import Path
from traceback import extract_tb
from typing import Any
from typing import Never

from jinja2 import TemplateError
from jinja2 import TemplateSyntaxError
from jinja2 import nodes
from jinja2 import pass_context
from jinja2.ext import Extension
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mkc.errors import ChatOptionError
from mkc.errors import ChatTemplateError
from mkc.runtime.text.channels import NO_EFFORT
from mkc.runtime.text.files import read_object
from mkc.runtime.text.formats import TagFormat
from mkc.runtime.text.guard import Guard
from mkc.runtime.text.guard import json_form
from mkc.runtime.text.messages import ChatRequest
from mkc.runtime.text.messages import Prompt
from mkc.runtime.text.messages import normal_messages
from mkc.runtime.text.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "tokenizer_config.json"
DEFAULT = "default"  # of a list of named templates, the one for requests without tools
WITH_TOOLS = "tool_use"
# Templates may build their markup from a role, as in `'<|' + message.role + '|>'`.
ROLES = ("system", "developer", "user", "assistant", "tool")
# What every request gives to a template; the rest of what a template looks at are its options.
GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
EFFORT = "reasoning_effort"  # the option that says how much a model thinks
GUARD_VARIABLE = "_guard"  # tells the filters which character it is
OWN_FRAME = "<template>"  # the file name that Jinja gives a template made from a string


class ChatTemplate:
    """Renders requests with a Jinja template that sees what transformers would show it.

    Attributes:
      path: where the template comes from, for messages.
      source: its text.
    """

    def __init__(
        self,
        source: str,
        *,
        path: Path,
        tokenizer: Tokenizer,
        tags: TagFormat | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """
        Args:
          source: the template.
          path: where it was read.
          tokenizer: of the same checkpoint.
          tags: how thoughts are marked.
          now: the time that `strftime_now` tells.

        Raises:
          ChatTemplateError: it does not parse.
        """
        self.path = path
        self.source = source
        self._tokenizer = tokenizer
        self._tags = tags or TagFormat()
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self._words = _words(environment, source)
            looked_at = find_undeclared_variables(environment.parse(source))
            self._options = looked_at - GIVEN - environment.globals.keys() - tokenizer.names.keys()
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                path=path,
                line=error.lineno,
                problem=error.message or "does not parse",
                hint="Use the template that came with the checkpoint, or correct this line",
            ) from error

    def encode(self, request: ChatRequest) -> Prompt:
        """Renders a request to ids: special tokens of the template, and text of the request.

        Raises:
          ChatMessageError: a message that is none.
          ChatOptionError: an option that the template does not look at.
          ChatTemplateError: the template refuses the request; with its line and its words.
        """
        variables = self._variables(request)
        guard = Guard(
            self._tokenizer.special_tokens,
            template_words=self._words,
            texts=[variables, self.source, list(self._tokenizer.special_tokens)],
        )
        guarded = self._render(guard.protect(variables), guard)
        text = guard.remove(guarded)
        return Prompt(
            ids=tuple(self._tokenizer.encode_guarded(guarded, guard=guard.mark)),
            text=text,
            opens_reasoning=self._opens_reasoning(guarded),
            may_reason=variables.get("enable_thinking") is not False,
        )

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """What comes from the request, in the form in which templates expect it."""
        options = dict(request.options)
        for name in sorted(options.keys() - self._options):
            known = ", ".join(sorted(self._options))
            expected = f"no such option; there are {known}" if known else "no options"
            raise ChatOptionError(option=name, got=options[name], expected=expected)
        if request.thinking is not None:
            options.setdefault("enable_thinking", request.thinking)
        if request.effort is not None and EFFORT in self._options:
            options.setdefault(EFFORT, request.effort)
        elif request.effort not in (None, NO_EFFORT):
            expected = f"{NO_EFFORT} or nothing: the template knows no levels"
            raise ChatOptionError(option="effort", got=request.effort, expected=expected)
        messages = [self._adapt(message) for message in normal_messages(request.messages)]
        return {
            **options,
            "messages": messages,
            "tools": list(request.tools) or None,
            "documents": list(request.documents) or None,
            "add_generation_prompt": request.add_generation_prompt,
        }

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """A developer is a system where the template knows none; thoughts are separated."""
        if message["role"] == "developer" and "developer" not in self.source:
            message["role"] = "system"
        close = self._tags.reasoning_close
        if message["role"] != "assistant" or "reasoning_content" in message or not close:
            return message
        thought, found, answer = message["content"].partition(close)
        if found:
            message["reasoning_content"] = thought.split(self._tags.reasoning_open)[-1].strip("\n")
            message["content"] = answer.lstrip("\n")
        return message

    def _render(self, variables: Mapping[str, Any], guard: Guard) -> str:
        """Runs the template; `variables` are guarded."""
        names = self._tokenizer.names
        try:
            return self._template.render({**names, **variables, GUARD_VARIABLE: guard.mark})
        except Exception as error:  # a template can raise whatever Python can
            problem = error.message if isinstance(error, TemplateError) else _described(error)
            raise ChatTemplateError(
                path=self.path,
                line=_line(error),
                problem=guard.remove(problem or type(error).__name__),
            ) from error

    def _opens_reasoning(self, guarded: str) -> bool:
        """Whether the template has left a thought open at the end."""
        opening = self._tags.reasoning_open
        return bool(opening) and guarded.rstrip().endswith(opening)


def load_chat_templates(folder: Path) -> dict[str, tuple[str, Path]]:
    """The templates of a checkpoint by name: source and place. Empty when it has none."""
    file = folder / TEMPLATE_FILE
    if file.exists():
        return {DEFAULT: (file.read_text(encoding="utf-8"), file)}
    settings = folder / SETTINGS_FILE
    found = read_object(settings).get("chat_template")
    if isinstance(found, str):
        return {DEFAULT: (found, settings)}
    if isinstance(found, Sequence):
        return {one["name"]: (one["template"], settings) for one in found}
    return {}


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up; templates depend on all of it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, not as HTML wants it."""
    text = dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    mark: str = context[GUARD_VARIABLE]
    return text.replace(json_form(mark), mark) if ensure_ascii else text


def _raise(message: str) -> Never:
    raise TemplateError(message)


def _words(environment: ImmutableSandboxedEnvironment, source: str) -> frozenset[str]:
    """Names and quoted words of a template: what it looks up, and what it compares with."""
    words = set(ROLES)
    for _, kind, value in environment.lex(source):
        word = value[1:-1] if kind == "string" else value
        if kind in ("name", "string") and word.isidentifier():
            words.add(word)
    return frozenset(words)


def _line(error: Exception) -> int | None:
    """The line of the template that raised."""
    frames = extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if frame.filename == OWN_FRAME]
    return own[-1] if own else None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
