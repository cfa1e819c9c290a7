"""Grammars of outputs with tags; see `TagFormat`."""

from __future__ import annotations

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
    """Expressions of the parts of an output, and the rules that they refer to.

    A rule of text that goes on until a tag is lazy, or fits nothing that has the tag before its
    end: a rule that could go on behind a tag would hide what the tag means.
    """

    def __init__(self, tags: TagFormat) -> None:
        self.rules = Rules()
        self._tags = tags

    def thought(self, prompt: Prompt) -> str:
        """The thought in front of the answer, where there may or must be one."""
        tags = self._tags
        is_over = prompt.text.rstrip().endswith(tags.reasoning_close)
        if not tags.reasoning_close or is_over or not prompt.may_reason:
            return ""
        gap = self.rules.add("gap", r"/\n{0,2}/")
        end = f"{TEXT}*{pattern(tags.reasoning_close)}"
        if prompt.opens_reasoning:
            return f"{self.rules.add('thought[lazy]', f'/{end}/')} {gap}"
        thought = self.rules.add("thought[lazy]", f"/{pattern(tags.reasoning_open)}{end}/")
        return f"({thought} {gap})?"

    def answer(self, form: Form) -> str:
        """What follows the thought."""
        content = None if form.content is None else self.rules.part(form.content)
        if form.calls is None:
            return content or self._text()
        calls = self._calls(form.calls)
        if form.calls.needed:
            return calls
        if content is not None:
            return f"({content} | {calls})"
        return f"({self._text()} | {self._text_and_calls(form.calls)})"

    def _text(self) -> str:
        """Text that is no thought."""
        return self.rules.add("TEXT", f"/{TEXT}*/{self._no_thought()}")

    def _no_thought(self) -> str:
        opening = self._tags.reasoning_open
        return f" & ~/{pattern(opening)}{TEXT}*/" if opening else ""

    def _calls(self, calls: Calls) -> str:
        opening = f"{self._tags.call_open}\n"
        bodies = [self._body(place, one) for place, one in calls.tools.items()]
        end = literal(f"{self._tags.function_close}\n{self._tags.call_close}")
        self.rules.add("call", f"({' | '.join(bodies)}) {end}")
        more = self.rules.add("more", f"({literal(f'\n{opening}')} call)*")
        return f"{literal(opening)} call" + (f" {more}" if calls.several else "")

    def _text_and_calls(self, calls: Calls) -> str:
        """Text, and calls behind it: from an opening tag on, only a call can follow."""
        lead = f"/{TEXT}*{pattern(self._tags.call_open)}/{self._no_thought()}"
        self.rules.add("lead[lazy]", lead)
        return 'lead "\\n" call' + (" more" if calls.several else "")

    def _body(self, place: int, tool: Tool) -> str:
        """A function with its arguments, up to its end tag."""
        tags = self._tags
        begin = literal(f"{tags.function_open}{tool.function.name}{tags.name_end}\n")
        arguments = [
            self._argument(f"t{place}a{number}", one)
            for number, one in enumerate(arguments_of(tool, place, ends_name=tags.name_end))
        ]
        return self.rules.add(f"t{place}", " ".join([begin, *arguments]))

    def _argument(self, name: str, argument: Argument) -> str:
        begin = f"{self._tags.parameter_open}{argument.key}{self._tags.name_end}\n"
        values = [
            self._value(f"{name}v{number}", one) for number, one in enumerate(argument.values)
        ]
        self.rules.add(name, f'{literal(begin)} ({" | ".join(values)}) "\\n"')
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
        return self.rules.add(name.upper(), f"{text} & ~/{TEXT}*{pattern(close)}{TEXT}+/")
