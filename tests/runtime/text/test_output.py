"""Rounds of ids to events: what is used, and what stops the output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.runtime.text import Chat
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import Reply
from mkc.runtime.text import StopConditions
from mkc.runtime.text import joined
from tests.runtime.text.splits import CUTS
from tests.runtime.text.splits import divided


def ids_of(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer.encode(text, allow_special=True)


def test_ids_behind_a_stop_id_are_not_used(template_chat: Chat) -> None:
    stream = template_chat.plain_output(())
    ids = ids_of(template_chat, "the<|end|>cat")
    update = stream.feed(ids)
    assert update.events == (ContentDelta(text="the"),)
    assert update.stopped_by == template_chat.tokenizer.special_tokens["<|end|>"]
    assert ids[: update.used] == ids_of(template_chat, "the<|end|>")
    assert stream.feed(ids).used == 0
    assert stream.finish() == ()


def test_ids_behind_a_stop_string_are_not_used(template_chat: Chat) -> None:
    stream = template_chat.plain_output((), stops=StopConditions(strings=("on",)))
    ids = ids_of(template_chat, "sat on the mat")
    update = stream.feed(ids)
    assert joined(update.events).content == "sat "
    assert update.stopped_by == "on"
    assert template_chat.tokenizer.decode(ids[: update.used]).startswith("sat on")
    assert update.used < len(ids)


def test_the_checkpoints_stop_ids_can_be_ignored(template_chat: Chat) -> None:
    end, stop = (template_chat.tokenizer.special_tokens[text] for text in ("<|end|>", "<|stop|>"))
    stops = StopConditions(ignore_checkpoint=True, ids=frozenset({stop}))
    update = template_chat.plain_output((), stops=stops).feed([end, end, stop, end])
    assert (update.used, update.stopped_by) == (3, stop)


def test_the_stop_string_can_be_included(template_chat: Chat) -> None:
    stops = StopConditions(strings=("on",), include_string=True)
    update = template_chat.plain_output((), stops=stops).feed(ids_of(template_chat, "sat on the"))
    assert joined(update.events).content == "sat on"


def test_at_a_limit_of_length_what_was_held_back_is_shown(template_chat: Chat) -> None:
    stream = template_chat.plain_output((), stops=StopConditions(strings=("mat!",)))
    shown = stream.feed(ids_of(template_chat, "the mat")).events
    assert joined(shown).content == "the "[: len(joined(shown).content)]
    assert joined([*shown, *stream.finish()]).content == "the mat"


def test_a_plain_output_has_no_markup(template_chat: Chat) -> None:
    text = "<think>\n<tool_call> \n"
    stream = template_chat.plain_output(())
    events = [*stream.feed(ids_of(template_chat, text)).events, *stream.finish()]
    assert joined(events) == Reply(reasoning="", content=text, tool_calls=())


def test_an_output_continues_the_character_in_which_the_prompt_ends(channel_chat: Chat) -> None:
    raw = "早".encode()
    stream = channel_chat.plain_output(list(raw[:1]))
    assert stream.feed(list(raw[1:])).events == (ContentDelta(text="早"),)


@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_says_whether_a_thought_is_open(template_chat: Chat, thinking: bool) -> None:
    request = ChatRequest(messages=[{"role": "user", "content": "Hi"}], thinking=thinking)
    stream = template_chat.output(template_chat.encode(request))
    update = stream.feed(ids_of(template_chat, "the cat"))
    kind = ReasoningDelta if thinking else ContentDelta
    assert update.events == (kind(text="the cat"),)


def test_a_stop_string_inside_a_thought_leaves_it_a_thought(template_chat: Chat) -> None:
    prompt = template_chat.encode(ChatRequest(messages=[]))
    stream = template_chat.output(prompt, stops=StopConditions(strings=("cat",)))
    update = stream.feed(ids_of(template_chat, "the cat</think>sat"))
    assert joined(update.events) == Reply(reasoning="the ", content="", tool_calls=())


TEXT = st.lists(
    st.sampled_from(["the ", "cat", "</think>", "早", "🙂", "<tool_call>", "on", "\n", "<|turn|>"]),
    max_size=12,
).map("".join)


@given(text=TEXT, cuts=CUTS, strings=st.lists(st.sampled_from(["cat", "on", "a", "早🙂"])))
def test_no_division_into_rounds_changes_the_output(
    template_chat: Chat, text: str, cuts: list[int], strings: list[str]
) -> None:
    prompt = template_chat.encode(ChatRequest(messages=[]))
    ids = ids_of(template_chat, text)

    def followed(rounds: list[list[int]]) -> tuple[Reply, int]:
        stream = template_chat.output(prompt, tools=[], stops=StopConditions(strings=(*strings,)))
        updates = [stream.feed(one) for one in rounds]
        events = [one for update in updates for one in update.events]
        return joined([*events, *stream.finish()]), sum(update.used for update in updates)

    assert followed(divided(ids, cuts)) == followed([ids])
