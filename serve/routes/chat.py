"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence
from dataclasses import replace

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import RequestFieldError
from mkc.runtime.request import Delta
from mkc.runtime.request import Output
from mkc.runtime.request import Request
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import Event
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import ToolArgumentsDelta
from mkc.runtime.text import ToolCallBegin
from mkc.runtime.text import joined
from serve.building import chat_prompt
from serve.building import check_model
from serve.building import sequences
from serve.constraints import chat_constraint
from serve.context import Asked
from serve.context import Server
from serve.context import new_id
from serve.context import now
from serve.forms import has_form
from serve.model import ServedModel
from serve.outcome import DONE
from serve.outcome import EventStream
from serve.outcome import chosen_logprobs
from serve.outcome import data_event
from serve.outcome import error_event
from serve.outcome import finish_name
from serve.outcome import reporting_errors
from serve.outcome import stop_reason
from serve.outcome import usage_of
from serve.outcome import whole
from serve.schemas.chat import CalledFunction
from serve.schemas.chat import CalledTool
from serve.schemas.chat import ChatChoice
from serve.schemas.chat import ChatChunkChoice
from serve.schemas.chat import ChatCompletion
from serve.schemas.chat import ChatCompletionChunk
from serve.schemas.chat import ChatCompletionRequest
from serve.schemas.chat import ChatLogprobs
from serve.schemas.chat import ChatMessage
from serve.streaming import StreamUsage
from serve.template import EventTemplates
from serve.ticket import Ticket


async def chat_completions(server: Server, http: HttpRequest) -> Response:
    """Answers `POST /v1/chat/completions`."""
    asked = await server.read(http, ChatCompletionRequest)
    check_model(asked.model, asked.body.model)
    requests = await run_in_threadpool(requests_of, asked.body, asked.model)
    ticket = await server.submit(http, requests)
    writer = _Writer(asked)
    if asked.body.stream:
        usage = StreamUsage.of(asked.body.stream_options, force=server.settings.force_usage)
        chunks = reporting_errors(writer.stream(ticket, usage), error_event)
        return EventStream(chunks, ticket, asked.headers)
    return asked.answer(writer.whole(await whole(http, ticket)))


def requests_of(body: ChatCompletionRequest, model: ServedModel) -> list[Request]:
    """The sequences of a request. Raises `MkcError`."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestFieldError(
            field="top_logprobs", problem="is there without logprobs", expected="logprobs: true"
        )
    tools = body.tools if body.tools is not None and body.tool_choice != "none" else []
    choice = body.tool_choice
    prompt = chat_prompt(
        model,
        body.messages,
        tools=tools,
        tool_choice=choice if isinstance(choice, str) else "required" if choice else "auto",
        effort=body.reasoning_effort,
        options=body.chat_template_kwargs,
        response_format=body.response_format,
    )
    return sequences(
        body,
        model,
        prompt,
        count=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        alternatives=(body.top_logprobs or 0) if body.logprobs else None,
        tools=[one.model_dump(exclude_none=True) for one in tools] or None,
        calls_first=has_form(body.response_format, body),
        constraint=chat_constraint(
            model,
            prompt,
            body,
            response_format=body.response_format,
            guided=body,
            tools=tools,
            tool_choice=choice,
            parallel=body.parallel_tool_calls,
        ),
    )


class _Writer:
    """Makes the answers to one request."""

    def __init__(self, asked: Asked[ChatCompletionRequest]) -> None:
        self._body = asked.body
        self._model = asked.model
        self._id = new_id("chatcmpl")
        self._created = now()
        self._templates = EventTemplates()
        self._own_ids = frozenset(asked.body.stop_token_ids or ())

    def whole(self, outputs: Sequence[Output]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model.name,
            choices=[self._choice(index, one) for index, one in enumerate(outputs)],
            usage=usage_of([one.finish for one in outputs], prompts=1),
        )

    async def stream(self, ticket: Ticket, usage: StreamUsage) -> AsyncIterator[bytes]:
        usage.begin(ticket, prompts=1)
        for index in range(len(ticket.requests)):
            first = ChatMessage(role="assistant", content="")
            yield self._chunk(index, first, None, usage)
        called: set[int] = set()
        only_text = not (self._body.logprobs or usage.in_chunks)  # is what chunks differ in
        async for index, delta in ticket.deltas():
            usage.take(index, delta)
            texts = [one for one in delta.events if isinstance(one, ContentDelta | ReasoningDelta)]
            if only_text and delta.finish is None and len(texts) == len(delta.events):
                for one in texts:
                    yield self._text_chunk(index, one, usage)
                continue
            messages = list(_messages(delta.events))
            if any(one.tool_calls for one in messages):
                called.add(index)
            if delta.finish is not None or (delta.logprobs and not messages):
                messages.append(ChatMessage())
            for place, message in enumerate(messages):
                # The log-probabilities go with the first message, the end with the last one.
                part = delta if place == 0 else None
                end = delta if place == len(messages) - 1 else None
                yield self._chunk(index, message, part, usage, end=end, called=index in called)
        if usage.at_end:
            yield data_event(self._completion_chunk([], usage).json_bytes())
        yield DONE

    def _text_chunk(
        self, index: int, event: ContentDelta | ReasoningDelta, usage: StreamUsage
    ) -> bytes:
        def write(text: str) -> bytes:
            (message,) = _messages([replace(event, text=text)])
            return self._chunk(index, message, None, usage)

        return self._templates.event((index, type(event)), event.text, write)

    def _chunk(
        self,
        index: int,
        message: ChatMessage,
        part: Delta | None,
        usage: StreamUsage,
        *,
        end: Delta | None = None,
        called: bool = False,
    ) -> bytes:
        finish = end.finish if end is not None else None
        choice = ChatChunkChoice(
            index=index,
            delta=message,
            logprobs=self._logprobs(part),
            finish_reason=None if finish is None else finish_name(finish, called=called),
        )
        if finish is not None:
            choice.stop_reason = stop_reason(finish, self._own_ids)
        return data_event(self._completion_chunk([choice], usage).json_bytes())

    def _completion_chunk(
        self, choices: list[ChatChunkChoice], usage: StreamUsage
    ) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model.name,
            choices=choices,
        )
        if usage.in_chunks or not choices:
            chunk.usage = usage.so_far()
        return chunk

    def _choice(self, index: int, output: Output) -> ChatChoice:
        reply = joined(output.events)
        calls = [
            CalledTool(
                id=new_id("call"),
                type="function",
                function=CalledFunction(name=one.name, arguments=one.arguments),
            )
            for one in reply.tool_calls
        ]
        message = ChatMessage(
            role="assistant", content=reply.content if reply.content or not calls else None
        )
        if reply.reasoning:
            message.reasoning_content = message.reasoning = reply.reasoning
        if calls:
            message.tool_calls = calls
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=finish_name(output.finish, called=bool(calls)),
            stop_reason=stop_reason(output.finish, self._own_ids),
        )

    def _logprobs(self, part: Delta | Output | None) -> ChatLogprobs | None:
        if part is None or not self._body.logprobs:
            return None
        return ChatLogprobs(content=chosen_logprobs(part, self._model.tokenizer))


def _messages(events: Sequence[Event]) -> list[ChatMessage]:
    """What is new, one message for each event."""
    found = []
    for event in events:
        match event:
            case ContentDelta():
                found.append(ChatMessage(content=event.text))
            case ReasoningDelta():
                found.append(ChatMessage(reasoning_content=event.text, reasoning=event.text))
            case ToolCallBegin():
                call = CalledTool(
                    index=event.index,
                    id=new_id("call"),
                    type="function",
                    function=CalledFunction(name=event.name, arguments=""),
                )
                found.append(ChatMessage(tool_calls=[call]))
            case ToolArgumentsDelta():
                piece = CalledFunction(arguments=event.text)
                found.append(
                    ChatMessage(tool_calls=[CalledTool(index=event.index, function=piece)])
                )
    return found
