"""The way in which a checkpoint chats: what its prompts and its output look like."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mkc.errors import ChatTemplateError
from mkc.runtime.text.channel_output import ChannelParser
from mkc.runtime.text.channels import ChannelChat
from mkc.runtime.text.detokenizer import Detokenizer
from mkc.runtime.text.formats import ChannelFormat
from mkc.runtime.text.formats import TagFormat
from mkc.runtime.text.formats import TextFormat
from mkc.runtime.text.formats import load_format
from mkc.runtime.text.messages import ChatRequest
from mkc.runtime.text.messages import Prompt
from mkc.runtime.text.output import ChannelReader
from mkc.runtime.text.output import OutputStream
from mkc.runtime.text.output import TextReader
from mkc.runtime.text.stop import StopStrings
from mkc.runtime.text.tag_output import TagParser
from mkc.runtime.text.template import DEFAULT
from mkc.runtime.text.template import WITH_TOOLS
from mkc.runtime.text.template import ChatTemplate
from mkc.runtime.text.template import load_chat_templates
from mkc.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class StopConditions:
    """What ends an output besides its length.

    Attributes:
      strings: text that ends it and is not shown.
      ids: more ids than those of the checkpoint.
      include_string: show the stop string.
      ignore_checkpoint: do not stop at the ids of the checkpoint.
    """

    strings: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()
    include_string: bool = False
    ignore_checkpoint: bool = False

    def all_ids(self, tokenizer: Tokenizer) -> Collection[int]:
        return self.ids if self.ignore_checkpoint else self.ids | tokenizer.stop_ids


class Chat:
    """Writes prompts and reads outputs, for a template or for channels.

    Attributes:
      tokenizer: of the checkpoint.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templates: Mapping[str, ChatTemplate],
        channels: tuple[ChannelFormat, ChannelChat] | None,
        tags: TagFormat,
        path: Path,
    ) -> None:
        self.tokenizer = tokenizer
        self._templates = dict(templates)
        self._channels = channels
        self._tags = tags
        self._path = path

    @property
    def markup(self) -> TagFormat | ChannelFormat:
        """How outputs are written."""
        return self._channels[0] if self._channels is not None else self._tags

    def encode(self, request: ChatRequest) -> Prompt:
        """The prompt of a request.

        Raises:
          ChatMessageError, ChatOptionError, ChatTemplateError: what is wrong with the request.
        """
        if self._channels is not None:
            return self._channels[1].encode(request)
        name = WITH_TOOLS if request.tools and WITH_TOOLS in self._templates else DEFAULT
        template = self._templates.get(name)
        if template is None:
            known = ", ".join(sorted(self._templates)) or "none"
            raise ChatTemplateError(
                path=self._path,
                line=None,
                problem=f"there is no template '{name}'; templates of the checkpoint: {known}",
                hint="Send a prompt instead of messages, or pass a template with --chat-template",
            )
        return template.encode(request)

    def output(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stops: StopConditions | None = None,
        calls_first: bool = False,
    ) -> OutputStream:
        """Reads the output that follows a chat prompt.

        Args:
          prompt: says whether a thought is open.
          tools: what the model may call; None when it may call nothing.
          stops: what ends the output.
          calls_first: what looks like a call behind some content is content.
        """
        conditions = stops or StopConditions()
        ids = conditions.all_ids(self.tokenizer)
        if self._channels is None:
            parser = TagParser(
                self._tags,
                in_reasoning=prompt.opens_reasoning,
                tools=tools,
                calls_first=calls_first,
            )
            return self._text_output(prompt.ids, parser, conditions)
        channels = self._channels[0].channels
        opened = channels.reasoning if prompt.opens_reasoning else channels.content
        reader = ChannelReader(
            ChannelParser(self._channels[0], self.tokenizer, channel=opened),
            conditions.strings,
            include_stop=conditions.include_string,
        )
        return OutputStream(reader, stop_ids=ids)

    def plain_output(
        self, prompt_ids: Sequence[int], *, stops: StopConditions | None = None
    ) -> OutputStream:
        """Reads the output that follows a prompt that is no chat: all of it is content."""
        nothing = TagFormat(reasoning_open="", reasoning_close="", call_open="")
        parser = TagParser(nothing, in_reasoning=False, tools=None)
        return self._text_output(prompt_ids, parser, stops or StopConditions())

    def _text_output(
        self, prompt_ids: Sequence[int], parser: TagParser, conditions: StopConditions
    ) -> OutputStream:
        reader = TextReader(
            Detokenizer(self.tokenizer, prompt=prompt_ids),
            StopStrings(conditions.strings, include=conditions.include_string),
            parser,
        )
        return OutputStream(reader, stop_ids=conditions.all_ids(self.tokenizer))


def load_chat(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    template: Path | None = None,
    text_format: TextFormat | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Chat:
    """How the checkpoint in `folder` chats.

    Args:
      folder: of the checkpoint.
      tokenizer: of the same checkpoint.
      template: a Jinja file to use instead of the checkpoint's template.
      text_format: to use instead of the folder's `text_format.json`.
      now: the time that templates are told.

    Raises:
      ChatTemplateError, TextFormatError, TokenizerFileError: with the place in the file.
    """
    formats = text_format or load_format(folder)
    if template is not None:
        sources = {DEFAULT: (_source(template), template)}
    else:
        sources = load_chat_templates(folder)
    channels = None
    if formats.channels is not None and template is None:
        channels = (formats.channels, ChannelChat(formats.channels, tokenizer, path=folder))
    templates = {
        name: ChatTemplate(source, path=path, tokenizer=tokenizer, tags=formats.tags, now=now)
        for name, (source, path) in sorted(sources.items())
    }
    return Chat(tokenizer, templates=templates, channels=channels, tags=formats.tags, path=folder)


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        hint = "Pass the path of a Jinja file"
        raise ChatTemplateError(path=path, line=None, problem=problem, hint=hint) from error
