"""Grammars of outputs with tags; see `TagFormat`."""

from __future__ import annotations

from collections.abc import Mapping
from re import escape
from typing import Any

from mkc.runtime.text import Prompt
from mkc.runtime.text import TagFormat
from serve.arguments import Argument
from serve.arguments import Value
from serve.arguments import arguments_of
from serve.forms import Calls
from serve.forms import Form
from serve.grammar import TEXT
from serve.grammar import Rules
from serve.grammar import literal
from serve.grammar import pattern
from serve.schemas.chat import Tool


def tag_grammar(tags: TagFormat, form: Form, prompt: Prompt) -> str:
    """The grammar of outputs that follow a prompt and have a form."""
    writer = _Writer(tags)
    return writer.rules.text(f"{writer.thought(prompt)} {writer.answer(form)}")


class _Writer:
    def __init__(self, tags: TagFormat) -> None:
        self.rules = Rules()
        self._tags = tags

    def thought(self, prompt: Prompt) -> str:
        """The thought in front of the answer, where there may or must be one."""
        tags = self._tags
        if not tags.reasoning_close or prompt.text.rstrip().endswith(tags.reasoning_close):
            return ""
        end = f"{TEXT}*{pattern(tags.reasoning_close)}"
        if prompt.opens_reasoning:
            return self.rules.add("thought[lazy]", f"/{end}/") + " gap"
        self.rules.add("thought[lazy]", f"/{pattern(tags.reasoning_open)}{end}/")
        return "(thought gap)?"

    def answer(self, form: Form) -> str:
        self.rules.add("gap", r"/\n{0,2}/")
        content = None if form.content is None else self.rules.part(form.content)
        calls = form.calls
        if calls is None:
            return content or self._text()
        if calls.needed:
            return self._calls(calls)
        if content is not None:
            return f"({content} | {self._calls(calls)})"
        return f"({self._text()} | {self._text_and_calls(calls)})"

    def _text(self) -> str:
        """Text that is no thought; a lazy rule that fits its beginning comes before it."""
        return self.rules.add("TEXT", f"/{TEXT}*/{self._no_thought()}")

    def _text_and_calls(self, calls: Calls) -> str:
        opening = pattern(self._tags.call_open)
        lead = self.rules.add("lead[lazy]", f"/{TEXT}*{opening}/{self._no_thought()}")
        rest = f"{literal(self._line_behind('call_open'))} call"
        more = f"({literal(self._line_before_call())} call)*" if calls.several else ""
        self._call_rule(calls)
        return f"{lead} {rest} {more}"

    def _no_thought(self) -> str:
        opening = self._tags.reasoning_open
        return f" & ~/{pattern(opening)}{TEXT}*/" if opening else ""

    def _calls(self, calls: Calls) -> str:
        self._call_rule(calls)
        first = literal(self._line_before_call().lstrip())
        more = f"({literal(self._line_before_call())} call)*" if calls.several else ""
        return f"{first} call {more}"

    def _line_before_call(self) -> str:
        return f"\n{self._tags.call_open}\n"

    def _line_behind(self, name: str) -> str:
        return "\n"

    def _call_rule(self, calls: Calls) -> None:
        """What stands behind the opening tag and its line end."""
        tags = self._tags
        bodies = [self._body(place, tool) for place, tool in calls.tools.items()]
        end = literal(f"{tags.function_close}\n{tags.call_close}")
        self.rules.add("call", f"({' | '.join(bodies)}) {end}")

    def _body(self, place: int, tool: Tool) -> str:
        tags = self._tags
        begin = literal(f"{tags.function_open}{tool.function.name}{tags.name_end}\n")
        arguments = [
            self._argument(f"t{place}v{number}", one)
            for number, one in enumerate(arguments_of(tool, place, no_text=tags.name_end))
        ]
        return self.rules.add(f"t{place}", " ".join([begin, *arguments]))

    def _argument(self, name: str, argument: Argument) -> str:
        tags = self._tags
        begin = literal(f"{tags.parameter_open}{argument.key}{tags.name_end}\n")
        values = [
            self._value(f"{name}k{number}", value) for number, value in enumerate(argument.values)
        ]
        self.rules.add(name, f'{begin} ({" | ".join(values)}) "\\n"')
        return name if argument.required else f"{name}?"

    def _value(self, name: str, value: Value) -> str:
        """A value, up to its end tag."""
        close = self._tags.parameter_close
        end = literal(f"\n{close}")
        if value.texts is not None:
            return f"({' | '.join(map(literal, value.texts))}) {end}"
        if value.schema is not None:
            return f"{self.rules.part(value.schema)} {end}"
        text = f"/{TEXT}{value.repeats}\\n{pattern(close)}/"
        ends_once = f"~/{TEXT}*{pattern(close)}{TEXT}+/"
        return self.rules.add(f"{name.upper()}", f"{text} & {ends_once}")
