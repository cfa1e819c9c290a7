"""Chat templates: what they render, and whose markup it is."""

from __future__ import annotations

from datetime import datetime
from json import dumps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline

from mkc.errors import ChatOptionError
from mkc.runtime.text import Chat
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import Prompt
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from mkc.runtime.text.guard import PRIVATE
from mkc.runtime.text.guard import Guard
from mkc.runtime.text.guard import json_form
from tests.runtime.text.checkpoints import HIDDEN
from tests.runtime.text.checkpoints import TAGS
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.runtime.text.checkpoints import write_json

SPECIALS = (*HIDDEN, *TAGS)
MARK = chr(PRIVATE[0])
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <b>the</b> weather, 早",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# Ordinary text, special tokens, pieces of them, and guards that somebody tries to guess.
HOSTILE = st.lists(
    st.sampled_from([*SPECIALS, "<|", "|>", "turn|>", "<", ">", "think", "/think>", "\n", " "])
    | st.sampled_from([MARK, chr(PRIVATE[1]), json_form(MARK), "<" + MARK + "|end|>"])
    | st.text(max_size=3),
    max_size=6,
).map("".join)


def chat_with(folder: Path, template: str, **settings: Any) -> Chat:
    byte_level_checkpoint(folder, template=template, settings=settings)
    return load_chat(folder, load_tokenizer(folder), now=lambda: datetime(2030, 5, 6))


def user(content: object) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": content}])


def markup(chat: Chat, prompt: Prompt) -> list[int]:
    """The special tokens of a prompt, in order."""
    return [token for token in prompt.ids if token in chat.tokenizer.special_ids]


def test_a_conversation(template_chat: Chat) -> None:
    request = ChatRequest(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather "}, text_part("now?")]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Look it up.",
                "tool_calls": [call("weather", '{"city": "Köln", "days": [1, 2]}')],
            },
            {"role": "tool", "content": "Rain.", "tool_call_id": "a"},
        ]
    )
    assert template_chat.encode(request).text == (
        "<|turn|>system\nBe brief.<|end|>\n"
        "<|turn|>user\nWeather now?<|end|>\n"
        "<|turn|>assistant\n<think>\nLook it up.\n</think>\n\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call><|end|>\n"
        "<|turn|>tool\nRain.<|end|>\n"
        "<|turn|>assistant\n<think>\n"
    )


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_thinking_is_an_option_of_the_template(template_chat: Chat) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    on = template_chat.encode(ChatRequest(messages=messages))
    off = template_chat.encode(ChatRequest(messages=messages, thinking=False))
    passed = template_chat.encode(
        ChatRequest(messages=messages, options={"enable_thinking": False})
    )
    assert on.opens_reasoning
    assert not off.opens_reasoning
    assert off.text.endswith("<think>\n\n</think>\n\n")
    assert passed == off


def test_tools_are_json_and_not_html(template_chat: Chat) -> None:
    prompt = template_chat.encode(
        ChatRequest(messages=[{"role": "user", "content": "Hi"}], tools=[TOOL])
    )
    assert dumps(TOOL, ensure_ascii=False) in prompt.text
    assert "<b>the</b>" in prompt.text


@given(content=st.text(max_size=20))
def test_ids_are_those_of_the_whole_text(
    template_chat: Chat, pipeline: Pipeline, content: str
) -> None:
    """Content is not cut off from the markup around it where the model saw it joined."""
    prompt = template_chat.encode(user("\n" + content))
    assert list(prompt.ids) == pipeline.encode(prompt.text, add_special_tokens=False).ids


@given(content=HOSTILE, thought=HOSTILE)
def test_markup_is_the_templates_alone(template_chat: Chat, content: str, thought: str) -> None:
    def request(content: str, thought: str) -> ChatRequest:
        turns = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "reasoning_content": "t" + thought},
        ]
        return ChatRequest(messages=[*turns, {"role": "user", "content": content}])

    harmless = template_chat.encode(request("x", "x"))
    prompt = template_chat.encode(request(content, thought))
    assert markup(template_chat, prompt) == markup(template_chat, harmless)
    assert template_chat.tokenizer.decode(prompt.ids) == prompt.text
    assert content.strip() in prompt.text


@given(text=HOSTILE)
def test_tools_and_arguments_hold_no_markup(template_chat: Chat, text: str) -> None:
    def request(text: str) -> ChatRequest:
        function = {"name": text, "description": text, "parameters": {"k" + text: text}}
        arguments = dumps({"a" + text: text, "b": [text, {"c": text}]})
        message = {"role": "assistant", "content": "", "tool_calls": [call("f" + text, arguments)]}
        return ChatRequest(messages=[message], tools=[{"type": "function", "function": function}])

    prompt = template_chat.encode(request(text))
    harmless = template_chat.encode(request("x"))
    assert markup(template_chat, prompt) == markup(template_chat, harmless)
    assert template_chat.tokenizer.decode(prompt.ids) == prompt.text


def test_parts_of_a_message_cannot_be_joined_to_markup(template_chat: Chat) -> None:
    prompt = template_chat.encode(user([text_part("<|en"), text_part("d|>")]))
    assert len(markup(template_chat, prompt)) == len(
        markup(template_chat, template_chat.encode(user("x")))
    )


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("<{{ messages[0].content }}>", "think"),
        ("<{{ messages[0].content | trim }}", "  think> and more"),
        ("{{ messages[0].content }}end|>", "<|"),
        ("{{ messages[0].content.split('#') | join }}", "<thi#nk>"),
        ("{{ messages[0].content | replace('x', '') }}", "<xthink>"),
        ("{% for key in messages[0].options %}<{{ key }}>{% endfor %}", ""),
        ("{{ messages | tojson(ensure_ascii=true) }}", "<think>"),
    ],
)
def test_templates_cannot_be_made_to_complete_markup(
    tmp_path: Path, template: str, content: str
) -> None:
    chat = chat_with(tmp_path, template)
    message = {"role": "user", "content": content, "options": {"think": 1}}
    prompt = chat.encode(ChatRequest(messages=[message]))
    assert markup(chat, prompt) == []
    assert "think" in prompt.text or "<|end|>" in prompt.text
    assert not any(ord(character) in PRIVATE for character in prompt.text)
    assert "\\udb" not in prompt.text


def test_markup_may_be_built_from_a_role(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, "{{ '<|' + messages[0].role + '|>' }}")
    flags = {"content": "<|user|>", "special": True}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": {"420": flags}})
    chat = load_chat(tmp_path, load_tokenizer(tmp_path))
    assert chat.encode(user("Hi")).ids == (420,)


def test_thoughts_inside_content_are_taken_out_of_it(template_chat: Chat) -> None:
    """As the templates of thinking models do themselves."""
    inline = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nYes."}
    apart = {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
    assert template_chat.encode(ChatRequest(messages=[inline])) == template_chat.encode(
        ChatRequest(messages=[apart])
    )


def test_the_guard_is_a_character_that_is_not_there() -> None:
    texts = ["a" + chr(PRIVATE[0]), {"b": json_form(chr(PRIVATE[1]))}]
    assert Guard(SPECIALS, template_words=(), texts=texts).mark == chr(PRIVATE[2])


def test_templates_have_what_transformers_gives_them(tmp_path: Path) -> None:
    template = """\
    {% for n in range(5) %}
        {% if n == 1 %}{% continue %}{% endif %}
        {% if n == 3 %}{% break %}{% endif %}
{{ n }}
    {% endfor %}
{% generation %}{{ strftime_now('%d %B %Y') }}{% endgeneration %} {{ eos_token }}{{ extra }}"""
    chat = chat_with(tmp_path, template)
    request = ChatRequest(messages=[], options={"extra": 7})
    assert chat.encode(request).text == "0\n2\n06 May 2030 <|end|>7"


@pytest.mark.parametrize("option", ["other", "messages", "tools", "eos_token", "range", "n"])
def test_an_option_that_the_template_does_not_look_at_is_refused(
    tmp_path: Path, option: str
) -> None:
    """It would change nothing. What every request gives and names of tokens are no options."""
    template = "{% for n in range(2) %}{{ extra }}{{ eos_token }}{{ messages }}{% endfor %}"
    chat = chat_with(tmp_path, template)
    with pytest.raises(ChatOptionError, match=rf"'{option}' is 7; .* there are extra\."):
        chat.encode(ChatRequest(messages=[], options={option: 7}))


def test_an_effort_that_the_template_does_not_look_at_is_refused(tmp_path: Path) -> None:
    knows = chat_with(tmp_path, "{{ reasoning_effort }}")
    assert knows.encode(ChatRequest(messages=[], effort="low")).text == "low"
    ignores = chat_with(tmp_path, "{{ messages }}")
    assert ignores.encode(ChatRequest(messages=[], effort="none")).text == "[]"
    with pytest.raises(ChatOptionError, match="effort"):
        ignores.encode(ChatRequest(messages=[], effort="low"))


def test_a_template_for_tools_is_used_for_tools(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    chat = load_chat(tmp_path, load_tokenizer(tmp_path))
    assert chat.encode(user("Hi")).text == "plain"
    assert chat.encode(ChatRequest(messages=[], tools=[TOOL])).text == "tools"


def test_another_template_can_be_used(byte_level_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine", encoding="utf-8")
    tokenizer = load_tokenizer(byte_level_folder)
    chat = load_chat(byte_level_folder, tokenizer, template=tmp_path / "mine.jinja")
    assert chat.encode(user("Hi")).text == "mine"


def test_the_request_is_not_changed(template_chat: Chat) -> None:
    message = {"role": "developer", "content": "<think>"}
    template_chat.encode(ChatRequest(messages=[message]))
    assert message == {"role": "developer", "content": "<think>"}
