"""Outputs as a whole or piece by piece: what answers of all kinds are made of."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import suppress

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive
from starlette.types import Scope
from starlette.types import Send

from mkc.errors import MkcError
from mkc.runtime.request import Delta
from mkc.runtime.request import Finish
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Output
from mkc.runtime.text import Tokenizer
from serve.failures import INTERNAL
from serve.failures import answer_of
from serve.failures import failure
from serve.schemas.base import DraftUsage
from serve.schemas.base import TokenDetails
from serve.schemas.base import Usage
from serve.schemas.chat import ChosenLogprob
from serve.schemas.chat import TopLogprob
from serve.schemas.completions import FinishName
from serve.ticket import Ticket
from serve.ticket import joined_delta

log = logging.getLogger("mkc.serve")

EVENT_STREAM = "text/event-stream"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def whole(http: HttpRequest, ticket: Ticket) -> list[Output]:
    """All outputs, in order.

    Raises:
      ClientGoneError: the client went away; the sequences are cancelled.
      MkcError: a sequence ended with an error, or time is up.
    """
    collecting = asyncio.ensure_future(_collect(ticket))
    leaving = asyncio.ensure_future(_disconnect(http))
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise ClientGoneError
        return collecting.result()
    finally:
        ticket.close()
        for task in (collecting, leaving):
            task.cancel()
            with suppress(BaseException):
                await task


async def _collect(ticket: Ticket) -> list[Output]:
    deltas: list[list[Delta]] = [[] for _ in ticket.requests]
    async for index, delta in ticket.deltas():
        deltas[index].append(delta)
    return [joined_output(one) for one in deltas]


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def joined_output(deltas: Sequence[Delta]) -> Output:
    """The output that its deltas amount to; the last one has its end."""
    whole = joined_delta(deltas)
    assert whole.finish is not None
    return Output(
        tokens=whole.tokens,
        events=whole.events,
        text=whole.text,
        logprobs=whole.logprobs,
        alternatives=whole.alternatives,
        finish=whole.finish,
    )


class EventStream(StreamingResponse):
    """Server-sent events; however it ends, the sequences behind it end too."""

    def __init__(
        self, chunks: AsyncIterator[bytes], ticket: Ticket, headers: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, headers=STREAM_HEADERS | dict(headers), media_type=EVENT_STREAM)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.close()


async def reporting_errors(
    chunks: AsyncIterator[bytes], event: Callable[[bytes], bytes]
) -> AsyncIterator[bytes]:
    """The chunks; an error on the way becomes the last one.

    Args:
      event: the error's JSON as an event.
    """
    try:
        async for chunk in chunks:
            yield chunk
    except MkcError as error:
        yield event(answer_of(error).json_bytes())
    except Exception as error:
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("a stream failed with %s\n%s", type(error).__name__, frames)
        message = f"the server failed with {type(error).__name__}; see its log"
        yield event(failure(INTERNAL, message).json_bytes())


def data_event(json: bytes) -> bytes:
    """An event without a name."""
    return b"data: " + json + b"\n\n"


def error_event(json: bytes) -> bytes:
    """An error, as clients of completions look for it, and the end of the stream."""
    return data_event(json) + DONE


def usage_of(finishes: Sequence[Finish], *, prompts: int) -> Usage:
    """Tokens of a request.

    Args:
      finishes: of all its sequences, those of one prompt next to each other.
      prompts: how many prompts there were.
    """
    each = len(finishes) // prompts
    statistics = [one.statistics for one in finishes]
    firsts = statistics[::each]
    prompt = sum(one.prompt_tokens for one in firsts)
    output = sum(one.output_tokens for one in statistics)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=TokenDetails(cached_tokens=sum(one.cached_tokens for one in firsts)),
        draft=DraftUsage(
            rounds=sum(one.rounds for one in statistics),
            drafted=sum(one.drafted for one in statistics),
            accepted=sum(one.accepted for one in statistics),
        ),
    )


def finish_name(finish: Finish, *, called: bool = False) -> FinishName:
    """The reason as clients know it."""
    if finish.reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if called else "stop"


def stop_reason(finish: Finish, own_ids: frozenset[int]) -> str | int | None:
    """What ended an output, if the request asked for it."""
    is_own = isinstance(finish.stop, str) or finish.stop in own_ids
    return finish.stop if is_own else None


def chosen_logprobs(part: Delta | Output, tokenizer: Tokenizer) -> list[ChosenLogprob]:
    """One entry per token."""
    entries = []
    for chosen, others in zip(part.logprobs, part.alternatives, strict=True):
        text, raw = token_text(tokenizer, chosen.token)
        tops = []
        for one in others:
            shown, shown_raw = token_text(tokenizer, one.token)
            tops.append(TopLogprob(token=shown, logprob=one.logprob, bytes=shown_raw))
        entries.append(
            ChosenLogprob(token=text, logprob=chosen.logprob, bytes=raw, top_logprobs=tops)
        )
    return entries


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    """A token's text, with U+FFFD for parts of characters, and its bytes."""
    raw = tokenizer.token_bytes(token)
    return raw.decode("utf-8", "replace"), list(raw)


def no_answer() -> Response:
    """For a client that has gone; nobody reads it."""
    return Response(status_code=499)
