"""Grammars of outputs in channels; see `ChannelFormat`."""

from __future__ import annotations

from collections.abc import Mapping

from mkc.runtime.text import ChannelFormat
from mkc.runtime.text import Prompt
from mkc.runtime.text import Tokenizer
from mkc.runtime.text.channels import escaped
from serve.arguments import Argument
from serve.arguments import Value
from serve.arguments import arguments_of
from serve.forms import Calls
from serve.forms import Form
from serve.grammar import TEXT
from serve.grammar import Rules
from serve.grammar import literal
from serve.schemas.chat import Tool

INDEX = "/[0-9]{1,3}/"  # of a call; parsers do not look at it
KINDS = {"integer": "number"}  # what the format calls a JSON type, where it has another name


def channel_grammar(
    channels: ChannelFormat, tokenizer: Tokenizer, form: Form, prompt: Prompt
) -> str:
    """The grammar of outputs that follow a prompt and have a form."""
    writer = _Writer(channels, tokenizer)
    return writer.rules.text(writer.output(form, prompt))


class _Writer:
    """Expressions of the elements of a message, and the rules that they refer to.

    Delimiters are tokens that are no text, so text ends in front of them by itself.
    """

    def __init__(self, channels: ChannelFormat, tokenizer: Tokenizer) -> None:
        self.rules = Rules()
        self._names = channels.names
        self._channels = channels.channels
        ids = tokenizer.special_tokens
        markers = channels.markers
        self.rules.add("open", f"<[{ids[markers.open]}]>")
        self.rules.add("close", f"<[{ids[markers.close]}]>")
        self.rules.add("separator", f"<[{ids[markers.separator]}]>")
        self.rules.add("TEXT", f"/{TEXT}+/")

    def output(self, form: Form, prompt: Prompt) -> str:
        """The rest of the message behind the channel that the prompt has opened."""
        parts = []
        if prompt.opens_reasoning:
            parts += ["TEXT?", self._close(self._channels.reasoning)]
            parts.append(self._open(self._channels.content))
        parts.append(self._answer(form))
        parts.append(self._close(self._names.message))
        return " ".join(parts)

    def _answer(self, form: Form) -> str:
        content = "TEXT?" if form.content is None else self.rules.part(form.content)
        end = self._close(self._channels.content)
        if form.calls is None:
            return f"{content} {end}"
        calls = self._calls(form.calls)
        if form.calls.needed:
            return f"{end} {calls}"
        if form.content is not None:
            return f"({content} {end} | {end} {calls})"
        return f"{content} {end} ({calls})?"

    def _calls(self, calls: Calls) -> str:
        bodies = [self._body(place, one) for place, one in calls.tools.items()]
        call = self.rules.add("call", f"({' | '.join(bodies)})")
        tools = self._channels.tools
        many = f"{call}+" if calls.several else call
        return f"{self._open(tools)} {many} {self._close(tools)}"

    def _body(self, place: int, tool: Tool) -> str:
        names = self._names
        begin = f'{names.call} {names.tool}="{escaped(tool.function.name)}" {names.index}="'
        arguments = [
            self._argument(f"t{place}a{number}", one)
            for number, one in enumerate(arguments_of(tool, place, ends_name='"'))
        ]
        opening = f"open {literal(begin)} {INDEX} {literal('"')} separator"
        return self.rules.add(f"t{place}", " ".join([opening, *arguments, self._close(names.call)]))

    def _argument(self, name: str, argument: Argument) -> str:
        values = [
            self._value(argument.key, f"{name}v{number}", one)
            for number, one in enumerate(argument.values)
        ]
        self.rules.add(name, f"({' | '.join(values)}) {self._close(self._names.argument)}")
        return name if argument.required else f"{name}?"

    def _value(self, key: str, name: str, value: Value) -> str:
        """The opening of an argument, which says the kind of its value, and the value."""
        attributes = {self._names.key: key, self._names.type: KINDS.get(value.kind, value.kind)}
        opening = self._open(self._names.argument, attributes)
        if value.texts is not None:
            return f"{opening} ({' | '.join(map(literal, value.texts))})"
        if value.schema is not None:
            return f"{opening} {self.rules.part(value.schema)}"
        return f"{opening} {self.rules.add(name.upper(), f'/{TEXT}{value.repeats}/')}"

    def _open(self, name: str, attributes: Mapping[str, str] | None = None) -> str:
        pairs = [f' {key}="{escaped(value)}"' for key, value in (attributes or {}).items()]
        return f"open {literal(''.join([name, *pairs]))} separator"

    def _close(self, name: str) -> str:
        return f"close {literal(name)} separator"
