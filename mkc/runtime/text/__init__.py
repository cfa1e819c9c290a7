"""Text: tokenizers, chat templates, detokenisation, stop strings, and what outputs mean."""

from __future__ import annotations

from mkc.runtime.text.chat import Chat
from mkc.runtime.text.chat import StopConditions
from mkc.runtime.text.chat import load_chat
from mkc.runtime.text.detokenizer import Detokenizer
from mkc.runtime.text.events import ContentDelta
from mkc.runtime.text.events import Event
from mkc.runtime.text.events import ReasoningDelta
from mkc.runtime.text.events import Reply
from mkc.runtime.text.events import ToolArgumentsDelta
from mkc.runtime.text.events import ToolCall
from mkc.runtime.text.events import ToolCallBegin
from mkc.runtime.text.events import ToolCallEnd
from mkc.runtime.text.events import joined
from mkc.runtime.text.formats import ChannelFormat
from mkc.runtime.text.formats import TagFormat
from mkc.runtime.text.formats import TextFormat
from mkc.runtime.text.formats import load_format
from mkc.runtime.text.load import load_tokenizer
from mkc.runtime.text.messages import ChatRequest
from mkc.runtime.text.messages import Prompt
from mkc.runtime.text.output import OutputStream
from mkc.runtime.text.output import OutputUpdate
from mkc.runtime.text.stop import StopStrings
from mkc.runtime.text.tokenizer import Tokenizer

__all__ = [
    "ChannelFormat",
    "Chat",
    "ChatRequest",
    "ContentDelta",
    "Detokenizer",
    "Event",
    "OutputStream",
    "OutputUpdate",
    "Prompt",
    "ReasoningDelta",
    "Reply",
    "StopConditions",
    "StopStrings",
    "TagFormat",
    "TextFormat",
    "Tokenizer",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallBegin",
    "ToolCallEnd",
    "joined",
    "load_chat",
    "load_format",
    "load_tokenizer",
]
