"""Tokenizer files, templates, messages and text formats that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import Any

import pytest

from mkc.errors import ChatMessageError
from mkc.errors import ChatOptionError
from mkc.errors import ChatTemplateError
from mkc.errors import StopStringError
from mkc.errors import TextFormatError
from mkc.errors import TokenizerFileError
from mkc.errors import TokenizerVocabularyError
from mkc.errors import UnsupportedTokenizerError
from mkc.runtime.text import Chat
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import StopStrings
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_format
from mkc.runtime.text import load_tokenizer
from tests.errors.expect import refused
from tests.runtime.text.checkpoints import CHANNELS
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.runtime.text.checkpoints import ranked_checkpoint
from tests.runtime.text.checkpoints import write_json


def test_no_tokenizer(tmp_path: Path) -> None:
    with refused(TokenizerFileError, str(tmp_path), "tokenizer.json or tiktoken.model"):
        load_tokenizer(tmp_path)


def test_json_cut_off(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    with refused(TokenizerFileError, "tokenizer.json:", "no JSON", "came with the checkpoint"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("contents", ["[]", "{}", '{"model": 3}', '{"model": {"type": "BPE"}}'])
def test_json_of_something_else(tmp_path: Path, contents: str) -> None:
    (tmp_path / "tokenizer.json").write_text(contents, encoding="utf-8")
    with refused(TokenizerFileError, "tokenizer.json", "came with the checkpoint"):
        load_tokenizer(tmp_path)


def test_a_pipeline_that_the_package_refuses(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    edit(tmp_path / "tokenizer.json", lambda one: one["model"].update(merges=["not there"]))
    with refused(TokenizerFileError, "tokenizer.json: cannot be read", "came with the checkpoint"):
        load_tokenizer(tmp_path)


def test_settings_that_are_not_text(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe")
    with refused(TokenizerFileError, "tokenizer_config.json", "UTF-8", "JSON file"):
        load_tokenizer(tmp_path)


def test_a_token_with_two_ids(tmp_path: Path) -> None:
    other = {"added_tokens_decoder": {"7": {"content": "<|end|>", "special": True}}}
    byte_level_checkpoint(tmp_path, settings=other)
    with refused(TokenizerFileError, "tokenizer_config.json", "'<|end|>' has ids", " and 7"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("added", [{"seven": {"content": "x"}}, {"7": {"special": True}}])
def test_a_token_without_id_or_text(tmp_path: Path, added: dict[str, object]) -> None:
    byte_level_checkpoint(tmp_path, settings={"added_tokens_decoder": added})
    with refused(TokenizerFileError, "tokenizer_config.json: an added token is", "a 'content'"):
        load_tokenizer(tmp_path)


def test_a_stop_id_that_is_no_token(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": 5000})
    with refused(TokenizerFileError, "eos_token_id 5000 is no token", "below"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("vocab", [300, 406])
def test_a_vocabulary_that_is_too_small(tmp_path: Path, vocab: int) -> None:
    byte_level_checkpoint(tmp_path)
    with refused(
        TokenizerVocabularyError,
        "tokenizer.json: token '</tool_call>' has id 406",
        f"vocabulary ends at {vocab - 1}",
        f"below {vocab}",
        "Use the tokenizer that came with the checkpoint",
    ):
        load_tokenizer(tmp_path, vocab=vocab)
    assert load_tokenizer(tmp_path, vocab=407).vocab_size == 407


def test_a_vocabulary_that_the_config_says_is_too_small(tmp_path: Path) -> None:
    ranked_checkpoint(tmp_path)
    write_json(tmp_path / "config.json", {"text_config": {"vocab_size": 270}})
    with refused(TokenizerVocabularyError, "tiktoken.model", "ends at 269", "below 270"):
        load_tokenizer(tmp_path)


def set_prefix_space(one: dict[str, Any]) -> None:
    one["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda one: one["model"].update(type="Unigram"), "model.type is 'Unigram'"),
        (lambda one: one.update(decoder={"type": "Metaspace"}), "decoder is 'Metaspace'"),
        (set_prefix_space, "add_prefix_space is True"),
    ],
)
def test_another_kind_of_tokenizer(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], got: str
) -> None:
    byte_level_checkpoint(tmp_path)
    edit(tmp_path / "tokenizer.json", change)
    with refused(UnsupportedTokenizerError, "tokenizer.json", got, "does not support", "expected"):
        load_tokenizer(tmp_path)


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    description = loads(file.read_text(encoding="utf-8"))
    change(description)
    write_json(file, description)


@pytest.mark.parametrize("line", ["YWI=", "YWI= x", "%%% 999", "YWI= 1 2"])
def test_a_line_that_is_no_rank(tmp_path: Path, line: str) -> None:
    ranked_checkpoint(tmp_path)
    file = tmp_path / "tiktoken.model"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([*lines[:9], line, *lines[9:]]), encoding="utf-8")
    with refused(TokenizerFileError, "tiktoken.model:10", repr(line), "base64"):
        load_tokenizer(tmp_path)


def test_ranks_cut_off(tmp_path: Path) -> None:
    ranked_checkpoint(tmp_path)
    file = tmp_path / "tiktoken.model"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(lines[:200]), encoding="utf-8")
    with refused(TokenizerFileError, "no token for 56 bytes", "0xc8", "for every byte"):
        load_tokenizer(tmp_path)


def test_a_rank_twice(tmp_path: Path) -> None:
    ranked_checkpoint(tmp_path)
    file = tmp_path / "tiktoken.model"
    file.write_text(file.read_text(encoding="utf-8") + "YWJjZA== 5\n", encoding="utf-8")
    with refused(TokenizerFileError, "a rank is given twice"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "problem"), [(None, "'pat_str' is missing"), ("(", "does not compile")]
)
def test_no_pattern(tmp_path: Path, pattern: str | None, problem: str) -> None:
    ranked_checkpoint(tmp_path, settings={"pat_str": pattern})
    with refused(TokenizerFileError, problem, "regular expression"):
        load_tokenizer(tmp_path)


# Templates.


def chat_with(folder: Path, template: str) -> Chat:
    byte_level_checkpoint(folder, template=template)
    return load_chat(folder, load_tokenizer(folder))


HELLO = ChatRequest(messages=[{"role": "user", "content": "Hello <think>"}])


def test_a_template_that_does_not_parse(tmp_path: Path) -> None:
    with refused(ChatTemplateError, "chat_template.jinja:2", "Encountered unknown tag 'nothing'"):
        chat_with(tmp_path, "{% if true %}\n{% nothing %}\n{% endif %}")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("\n\n{{ raise_exception('no <think> here') }}", "no <think> here"),
        ("\n\n{{ raise_exception(messages[0].content) }}", "Hello <think>"),
        ("\n\n{{ messages[0].nothing.more }}", "nothing"),
        ("\n\n{{ 1 / 0 }}", "ZeroDivisionError"),
        ("\n\n{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("\n\n{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("\n\n{% for a in range(9999999) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_fails(tmp_path: Path, template: str, problem: str) -> None:
    chat = chat_with(tmp_path, template)
    with refused(ChatTemplateError, "chat_template.jinja:3", problem, "Correct the messages"):
        chat.encode(HELLO)


def test_no_template(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    chat = load_chat(tmp_path, load_tokenizer(tmp_path))
    with refused(ChatTemplateError, "no template 'default'", "--chat-template"):
        chat.encode(HELLO)


def test_another_template_that_is_not_there(tmp_path: Path) -> None:
    byte_level_checkpoint(tmp_path)
    with refused(ChatTemplateError, "mine.jinja", "No such file", "Pass the path of a Jinja file"):
        load_chat(tmp_path, load_tokenizer(tmp_path), template=tmp_path / "mine.jinja")


# Messages and options.


@pytest.mark.parametrize(
    ("message", "fragments"),
    [
        ("Hi", ("messages[1]: is 'Hi'", "an object")),
        ({"content": "Hi"}, ("messages[1].role: is None", "such as 'user'")),
        ({"role": "user", "content": 3}, ("messages[1].content: is 3", "text parts")),
        (
            {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]},
            ("messages[1].content[1]: is a part of type 'image_url'", "type 'text'"),
        ),
        ({"role": "user", "content": [{"type": "text"}]}, ("content[0]", "a string 'text'")),
        ({"role": "assistant", "tool_calls": {"a": 1}}, ("messages[1].tool_calls", "a list")),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
            ("messages[1].tool_calls[0]", "no function with a name"),
        ),
    ],
)
def test_a_message_that_is_none(tmp_path: Path, message: Any, fragments: tuple[str, ...]) -> None:
    chat = chat_with(tmp_path, "{{ messages }}")
    with refused(ChatMessageError, *fragments, "expected", "Correct the message"):
        chat.encode(ChatRequest(messages=[*HELLO.messages, message]))


@pytest.fixture
def channel_chat(tmp_path: Path) -> Chat:
    ranked_checkpoint(tmp_path)
    return load_chat(tmp_path, load_tokenizer(tmp_path))


def test_a_role_that_channels_do_not_have(channel_chat: Chat) -> None:
    with refused(ChatMessageError, "messages[0].role: is 'critic'", "assistant or tool"):
        channel_chat.encode(ChatRequest(messages=[{"role": "critic", "content": "x"}]))


def test_a_result_of_no_call(channel_chat: Chat) -> None:
    message = {"role": "tool", "content": "x", "tool_call_id": "c9"}
    with refused(ChatMessageError, "messages[0].tool_call_id: is 'c9'", "one of its tool_calls"):
        channel_chat.encode(ChatRequest(messages=[message]))


@pytest.mark.parametrize(
    ("request_", "fragments"),
    [
        (ChatRequest(messages=[], effort="some"), ("'effort' is 'some'", "none, low, high, max")),
        (ChatRequest(messages=[], options={"thinking": "on"}), ("'thinking' is 'on'", "true or")),
        (ChatRequest(messages=[], options={"mood": 1}), ("'mood' is 1", "no such option")),
        (ChatRequest(messages=[], tool_choice="f"), ("'tool_choice' is 'f'", "auto, none")),
        (
            ChatRequest(messages=[], response_format={"type": "xml"}),
            ("'response_format' is 'xml'", "json_schema"),
        ),
    ],
)
def test_an_option_that_channels_do_not_have(
    channel_chat: Chat, request_: ChatRequest, fragments: tuple[str, ...]
) -> None:
    with refused(ChatOptionError, *fragments, "leave the option out"):
        channel_chat.encode(request_)


def test_an_empty_stop_string() -> None:
    with refused(StopStringError, "['END', '']", "at least one character"):
        StopStrings(["END", ""])


# Descriptions of text formats.


@pytest.mark.parametrize(
    ("description", "fragments"),
    [
        ([], ("the whole file", "is []", "an object")),
        ({"patern": ""}, ("'patern' is unknown", "channels, pattern, special_slots, tags")),
        ({"special_slots": "8"}, ("'special_slots' is '8'", "a whole number")),
        ({"tags": {"call_open": None}}, ("'tags.call_open' is None", "a string")),
        ({"channels": {}}, ("'channels.markers' is missing", "a value")),
        ({"channels": {**CHANNELS, "thinking": 1}}, ("'channels.thinking' is 1", "true or false")),
        (
            {"channels": {**CHANNELS, "efforts": ["low", 2]}},
            ("'channels.efforts[1]' is 2", "a string"),
        ),
        (
            {"channels": {**CHANNELS, "default_effort": "huge"}},
            ("'channels.default_effort' is 'huge'", "low, high, max"),
        ),
        (
            {"channels": {**CHANNELS, "instructions": {"mood": {"type": "a", "text": "b"}}}},
            ("'channels.instructions.mood' is no occasion", "tool_choice_required"),
        ),
    ],
)
def test_a_description_that_is_wrong(
    tmp_path: Path, description: object, fragments: tuple[str, ...]
) -> None:
    write_json(tmp_path / "text_format.json", description)
    with refused(TextFormatError, "text_format.json: key", *fragments, "docs/tokenizers.md"):
        load_format(tmp_path)


def test_a_delimiter_that_is_no_special_token(tmp_path: Path) -> None:
    ranked_checkpoint(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    markers = {**CHANNELS["markers"], "separator": "<|none|>"}
    write_json(tmp_path / "text_format.json", {"channels": {**CHANNELS, "markers": markers}})
    with refused(TextFormatError, "'channels.markers.separator' is '<|none|>'", "special tokens"):
        load_chat(tmp_path, tokenizer)
