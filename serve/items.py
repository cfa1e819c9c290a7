"""The items of a response, and the events that tell how they come about."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from mkc.runtime.text import ContentDelta
from mkc.runtime.text import Event
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import ToolArgumentsDelta
from mkc.runtime.text import ToolCallBegin
from mkc.runtime.text import ToolCallEnd
from serve.schemas.responses import FunctionCallItem
from serve.schemas.responses import Item
from serve.schemas.responses import OutputMessage
from serve.schemas.responses import OutputText
from serve.schemas.responses import ReasoningItem
from serve.schemas.responses import ReasoningText
from serve.schemas.responses import Status

type Told = tuple[str, dict[str, Any]]  # name of an event behind `response.`, and its fields


class Items:
    """Follows an output; one item is open at a time.

    Attributes:
      done: the items, the last of which may be open.
    """

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._text = ""
        self._is_open = False

    def take(self, events: Sequence[Event]) -> Iterator[Told]:
        """What new events of the output mean for the items."""
        for event in events:
            match event:
                case ReasoningDelta():
                    yield from self._ensure(ReasoningItem, _new_reasoning)
                    yield from self._grow("reasoning_text.delta", event.text)
                case ContentDelta():
                    yield from self._ensure(OutputMessage, _new_message)
                    yield from self._grow("output_text.delta", event.text)
                case ToolCallBegin():
                    yield from self._open(
                        FunctionCallItem(
                            id=f"fc_{uuid4().hex}",
                            status="in_progress",
                            call_id=f"call_{uuid4().hex}",
                            name=event.name,
                            arguments="",
                        )
                    )
                case ToolArgumentsDelta():
                    yield from self._grow("function_call_arguments.delta", event.text)
                case ToolCallEnd():
                    yield from self.close("completed" if event.complete else "incomplete")

    def close(self, status: Status) -> Iterator[Told]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.done[-1]
        item.status = status
        match item:
            case OutputMessage():
                part = OutputText(text=self._text)
                item.content = [part]
                yield "output_text.done", self._at(text=self._text, content_index=0, logprobs=[])
                yield "content_part.done", self._at(part=part, content_index=0)
            case ReasoningItem():
                thought = ReasoningText(text=self._text)
                item.content = [thought]
                yield "reasoning_text.done", self._at(text=self._text, content_index=0)
                yield "content_part.done", self._at(part=thought, content_index=0)
            case FunctionCallItem():
                item.arguments = self._text
                yield "function_call_arguments.done", self._at(arguments=self._text, name=item.name)
        yield "output_item.done", {"output_index": len(self.done) - 1, "item": item}

    def _ensure(self, kind: type[Item], new: Callable[[], Item]) -> Iterator[Told]:
        """Opens an item of a kind unless one is open."""
        if not (self._is_open and isinstance(self.done[-1], kind)):
            yield from self._open(new())
            part = ReasoningText(text="") if kind is ReasoningItem else OutputText(text="")
            yield "content_part.added", self._at(part=part, content_index=0)

    def _open(self, item: Item) -> Iterator[Told]:
        yield from self.close("completed")
        self.done.append(item)
        self._text = ""
        self._is_open = True
        yield "output_item.added", {"output_index": len(self.done) - 1, "item": item}

    def _grow(self, name: str, text: str) -> Iterator[Told]:
        self._text += text
        fields = {} if name.startswith("function") else {"content_index": 0}
        if name.startswith("output_text"):
            fields["logprobs"] = []  # type: ignore[assignment]
        yield name, self._at(delta=text, **fields)

    def _at(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.done[-1].id, "output_index": len(self.done) - 1, **fields}


def _new_reasoning() -> Item:
    return ReasoningItem(id=f"rs_{uuid4().hex}", status="in_progress", content=[])


def _new_message() -> Item:
    return OutputMessage(id=f"msg_{uuid4().hex}", status="in_progress", content=[])
