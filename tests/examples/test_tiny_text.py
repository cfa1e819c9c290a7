"""The small model's tokenizer and template, and the rows that it is trained on."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from examples.tiny_family import WEIGHTS
from examples.tiny_tasks import TASKS
from examples.tiny_tasks import draw
from examples.tiny_text import VOCAB
from examples.tiny_text import Teacher
from examples.tiny_text import definitions
from examples.tiny_text import write_text_files
from examples.tiny_words import TOOLS
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import joined

SHIPPED = Path(__file__).parents[2] / "models" / "tiny"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher(SHIPPED)


def test_the_shipped_files_are_what_the_example_writes(tmp_path: Path) -> None:
    write_text_files(tmp_path, seed=0)
    for name in TEXT_FILES:
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text(), name


def test_any_text_survives(teacher: Teacher) -> None:
    text = "Zürich 東京 🙂 \t\n  12 + 7\r\n" + "".join(map(chr, range(256)))
    ids = teacher.tokenizer.encode(text, allow_special=False)
    assert teacher.tokenizer.decode(ids) == text
    assert max(ids) < VOCAB


def test_a_digit_is_a_token(teacher: Teacher) -> None:
    ids = teacher.tokenizer.encode("2024-02-28", allow_special=False)
    assert [teacher.tokenizer.decode([one]) for one in ids] == list("2024-02-28")


def test_markup_is_one_token_each(teacher: Teacher) -> None:
    for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</tool_call>"):
        assert len(teacher.tokenizer.encode(text, allow_special=True)) == 1
        assert len(teacher.tokenizer.encode(text, allow_special=False)) > 1


def prompt(teacher: Teacher, thinking: bool | None) -> str:
    messages = [{"role": "user", "content": "Hi"}]
    request = ChatRequest(messages=messages, tools=definitions(["get_time"]), thinking=thinking)
    return teacher.chat.encode(request).text


@pytest.mark.parametrize(("thinking", "opened"), [(None, True), (True, True), (False, False)])
def test_prompt(teacher: Teacher, thinking: bool | None, opened: bool) -> None:
    assert prompt(teacher, thinking) == (
        "<|im_start|>system\nTools:\nget_time(city: string)<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n" + ("<think>\n" if opened else "")
    )


@pytest.mark.parametrize("task", TASKS)
def test_what_is_taught_is_what_the_output_is_read_as(teacher: Teacher, task: str) -> None:
    """The answer's tokens, read back as an output, are the thought and the answer."""
    one = draw(Random(5), task, held_out=False)
    tools = definitions(one.tools)
    answer = {**one.answer, "reasoning_content": one.thought}
    whole = teacher.encode([*one.messages, answer], tools=tools)
    begin = teacher.chat.encode(ChatRequest(messages=one.messages, tools=tools))
    assert whole[: len(begin.ids)] == begin.ids
    stream = teacher.chat.output(begin, tools=tools)
    reply = joined(stream.feed(whole[len(begin.ids) :]).events)
    assert reply.reasoning == one.thought
    assert reply.content == one.answer["content"]
    assert len(reply.tool_calls) == len(one.answer.get("tool_calls", ()))
    mask = teacher.learned(whole)
    assert mask[-len(whole) + len(begin.ids) :].sum() == len(whole) - len(begin.ids) - 1


def test_parts_of_a_conversation_join(teacher: Teacher) -> None:
    """A row is put together from exchanges; the template would give the same ids."""
    rng = Random(3)
    parts = [draw(rng, task, held_out=False) for task in ("addition", "json", "sort_words")]
    messages = [message for one in parts for message in (*one.messages, one.answer)]
    system = [{"role": "system", "content": "Be brief."}]
    tools = definitions(list(TOOLS))
    joined_ids = [*teacher.encode(system, tools=tools)]
    for one in parts:
        joined_ids += teacher.encode([*one.messages, one.answer])
    assert joined_ids == list(teacher.encode([*system, *messages], tools=tools))


def test_rows(teacher: Teacher) -> None:
    def some() -> list[np.ndarray]:
        rows = teacher.rows(Random("a"), rows=4, length=96, weights=WEIGHTS)
        return [rows.tokens, rows.learned, rows.positions]

    tokens, learned, positions = some()
    assert all(map(np.array_equal, some(), (tokens, learned, positions)))
    assert tokens.shape == learned.shape == positions.shape == (4, 96)
    assert not learned[positions < 0].any(), "nothing is learned from padding"
    end = teacher.special("<|im_end|>")
    assert (tokens[learned == 1] == end).sum() >= 4, "the model learns to end its turn"
    assert not (tokens[learned == 1] == teacher.special("<|im_start|>")).any()


def test_held_out_rows_have_other_items(teacher: Teacher) -> None:
    shape = {"rows": 8, "length": 96, "weights": {"addition": 1.0}}
    kept = teacher.rows(Random(1), held_out=True, **shape)
    trained = teacher.rows(Random(1), **shape)
    assert not np.array_equal(kept.tokens, trained.tokens)
