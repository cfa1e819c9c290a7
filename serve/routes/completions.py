"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Sequence
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import RequestFieldError
from mkc.runtime.request import Delta
from mkc.runtime.request import Finish
from mkc.runtime.request import Output
from mkc.runtime.request import Request
from mkc.runtime.text import Prompt
from mkc.runtime.text import Tokenizer
from serve.building import check_model
from serve.building import id_prompt
from serve.building import sequences
from serve.building import text_prompt
from serve.constraints import text_constraint
from serve.context import Asked
from serve.context import Server
from serve.context import new_id
from serve.context import now
from serve.model import ServedModel
from serve.outcome import DONE
from serve.outcome import EventStream
from serve.outcome import data_event
from serve.outcome import error_event
from serve.outcome import finish_name
from serve.outcome import reporting_errors
from serve.outcome import stop_reason
from serve.outcome import token_text
from serve.outcome import usage_of
from serve.outcome import whole
from serve.schemas.completions import Completion
from serve.schemas.completions import CompletionChoice
from serve.schemas.completions import CompletionLogprobs
from serve.schemas.completions import CompletionRequest
from serve.streaming import StreamUsage
from serve.template import EventTemplates
from serve.ticket import Ticket


async def completions(server: Server, http: HttpRequest) -> Response:
    """Answers `POST /v1/completions`."""
    asked = await server.read(http, CompletionRequest)
    check_model(asked.model, asked.body.model)
    prompts = await run_in_threadpool(prompts_of, asked.body, asked.model)
    requests = await run_in_threadpool(_requests, asked.body, asked.model, prompts)
    ticket = await server.submit(http, requests)
    writer = _Writer(asked, prompts)
    if asked.body.stream:
        usage = StreamUsage.of(asked.body.stream_options, force=server.settings.force_usage)
        chunks = reporting_errors(writer.stream(ticket, usage), error_event)
        return EventStream(chunks, ticket, asked.headers)
    return asked.answer(writer.whole(await whole(http, ticket)))


def prompts_of(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """The prompts as ids.

    Raises:
      RequestFieldError: an id is no token.
    """
    given = body.prompt
    special = bool(body.allow_special_tokens)
    if isinstance(given, str):
        return [text_prompt(model, given, special=special)]
    if isinstance(given[0], int):
        return [id_prompt(model, [one for one in given if isinstance(one, int)], "prompt")]
    return [
        text_prompt(model, one, special=special)
        if isinstance(one, str)
        else id_prompt(model, one if isinstance(one, list) else [], "prompt")
        for one in given
    ]


def _requests(
    body: CompletionRequest, model: ServedModel, prompts: Sequence[Prompt]
) -> list[Request]:
    count = body.n or 1
    if body.best_of is not None and body.best_of != count:
        raise RequestFieldError(
            field="best_of", problem=f"is {body.best_of}", expected=f"n, which is {count}"
        )
    if body.echo and body.logprobs is not None:
        raise RequestFieldError(
            field="echo",
            problem="asks with logprobs for those of the prompt, which are not computed",
            expected="echo or logprobs",
        )
    constraint = text_constraint(model, body, body)
    return [
        request
        for prompt in prompts
        for request in sequences(
            body,
            model,
            prompt,
            count=count,
            max_tokens=body.max_tokens,
            alternatives=body.logprobs,
            is_chat=False,
            constraint=constraint,
        )
    ]


class _Writer:
    """Makes the answers to one request."""

    def __init__(self, asked: Asked[CompletionRequest], prompts: Sequence[Prompt]) -> None:
        self._body = asked.body
        self._model = asked.model
        self._tokenizer: Tokenizer = asked.model.tokenizer
        self._prompts = prompts
        self._each = asked.body.n or 1
        self._id = new_id("cmpl")
        self._created = now()
        self._templates = EventTemplates()
        self._offsets = [0] * (len(prompts) * self._each)

    def whole(self, outputs: Sequence[Output]) -> Completion:
        choices = [
            self._choice(index, self._echo(index) + one.text, one, one.finish)
            for index, one in enumerate(outputs)
        ]
        answer = self._completion(choices)
        answer.usage = usage_of([one.finish for one in outputs], prompts=len(self._prompts))
        return answer

    async def stream(self, ticket: Ticket, usage: StreamUsage) -> AsyncIterator[bytes]:
        usage.begin(ticket, prompts=len(self._prompts))
        begun: set[int] = set()
        async for index, delta in ticket.deltas():
            usage.take(index, delta)
            text = delta.text if index in begun else self._echo(index) + delta.text
            begun.add(index)
            if not (text or delta.logprobs or delta.finish):
                continue
            write = partial(self._chunk, index, delta, usage)
            only_text = not (delta.logprobs or delta.finish or usage.in_chunks)
            yield self._templates.event(index, text, write) if only_text else write(text)
        if usage.at_end:
            chunk = self._completion([])
            chunk.usage = usage.so_far()
            yield data_event(chunk.json_bytes())
        yield DONE

    def _chunk(self, index: int, delta: Delta, usage: StreamUsage, text: str) -> bytes:
        chunk = self._completion([self._choice(index, text, delta, delta.finish)])
        if usage.in_chunks:
            chunk.usage = usage.so_far()
        return data_event(chunk.json_bytes())

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model.name,
            choices=choices,
        )

    def _choice(
        self, index: int, text: str, part: Delta | Output, finish: Finish | None
    ) -> CompletionChoice:
        own_ids = frozenset(self._body.stop_token_ids or ())
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, part),
            finish_reason=None if finish is None else finish_name(finish),
        )
        if finish is not None:
            choice.stop_reason = stop_reason(finish, own_ids)
        return choice

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // self._each]
        text = prompt.text or self._tokenizer.decode(prompt.ids)
        self._offsets[index] = len(text)
        return text

    def _logprobs(self, index: int, part: Delta | Output) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        texts = [token_text(self._tokenizer, one.token)[0] for one in part.logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        tops = None
        if self._body.logprobs:
            tops = [
                {token_text(self._tokenizer, one.token)[0]: one.logprob for one in entry}
                for entry in part.alternatives
            ]
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[one.logprob for one in part.logprobs],
            top_logprobs=tops,
            text_offset=offsets,
        )
