"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import MkcError
from mkc.errors import RequestFieldError
from mkc.runtime.request import Finish
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from serve.building import chat_prompt
from serve.building import check_model
from serve.building import sequences
from serve.constraints import chat_constraint
from serve.context import Asked
from serve.context import Server
from serve.context import new_id
from serve.context import now
from serve.failures import answer_of
from serve.forms import has_form
from serve.inputs import messages_of
from serve.items import Items
from serve.model import ServedModel
from serve.outcome import EventStream
from serve.outcome import reporting_errors
from serve.outcome import usage_of
from serve.outcome import whole
from serve.schemas.base import TokenDetails
from serve.schemas.chat import Function
from serve.schemas.chat import FunctionName
from serve.schemas.chat import NamedTool
from serve.schemas.chat import Tool
from serve.schemas.responses import ForcedFunction
from serve.schemas.responses import FunctionTool
from serve.schemas.responses import Incomplete
from serve.schemas.responses import OutputTokenDetails
from serve.schemas.responses import ResponseError
from serve.schemas.responses import ResponseObject
from serve.schemas.responses import ResponsesRequest
from serve.schemas.responses import ResponseUsage
from serve.ticket import Ticket

SCHEMA_KEYS = ("name", "schema", "strict", "description")
FORM_FIELDS = ("response_format.json_schema", "response_format")  # both are text.format here


async def responses(server: Server, http: HttpRequest) -> Response:
    """Answers `POST /v1/responses`."""
    asked = await server.read(http, ResponsesRequest)
    check_model(asked.model, asked.body.model)
    request = await run_in_threadpool(request_of, asked.body, asked.model)
    ticket = await server.submit(http, [request])
    writer = _Writer(asked, request.sampling)
    if asked.body.stream:
        chunks = reporting_errors(writer.stream(ticket), _error_event)
        return EventStream(chunks, ticket, asked.headers)
    (output,) = await whole(http, ticket)
    for _ in writer.items.take(output.events):
        pass
    writer.end(output.finish)
    return asked.answer(writer.response)


def request_of(body: ResponsesRequest, model: ServedModel) -> Request:
    """The sequence of a request. Raises `MkcError`."""
    try:
        return _request_of(body, model)
    except RequestFieldError as error:
        for name in FORM_FIELDS:
            if error.field.startswith(name):
                raise error.of("text.format" + error.field.removeprefix(name)) from error
        raise


def _request_of(body: ResponsesRequest, model: ServedModel) -> Request:
    tools = [_tool(one) for one in body.tools or ()] if body.tool_choice != "none" else []
    choice = body.tool_choice
    named = (
        NamedTool(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, ForcedFunction)
        else choice
    )
    form = _response_format(body.text.format if body.text else None)
    prompt = chat_prompt(
        model,
        messages_of(body.input, body.instructions),
        tools=tools,
        tool_choice=named if isinstance(named, str) else "required" if named else "auto",
        effort=body.reasoning.effort if body.reasoning else None,
        options=body.chat_template_kwargs,
        response_format=form,
    )
    (request,) = sequences(
        body,
        model,
        prompt,
        count=1,
        max_tokens=body.max_output_tokens,
        tools=[one.model_dump(exclude_none=True) for one in tools] or None,
        calls_first=has_form(form),
        constraint=chat_constraint(
            model,
            prompt,
            body,
            response_format=form,
            tools=tools,
            tool_choice=named,
            parallel=body.parallel_tool_calls,
        ),
    )
    return request


def _error_event(json: bytes) -> bytes:
    return b"event: error\ndata: " + json + b"\n\n"


def _tool(given: FunctionTool) -> Tool:
    fields = given.model_dump(exclude={"type"}, exclude_none=True)
    return Tool(type="function", function=Function(**fields))


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The form in the way of chat completions, in which a schema is an object of its own."""
    if given is None or given.get("type") != "json_schema":
        return None if given is None else dict(given)
    schema = {key: given[key] for key in SCHEMA_KEYS if key in given}
    return {"type": "json_schema", "json_schema": schema}


class _Writer:
    """Makes the answer to one request.

    Attributes:
      response: as far as it has come.
    """

    def __init__(self, asked: Asked[ResponsesRequest], sampling: SamplingParams) -> None:
        body = asked.body
        self.items = Items()
        self._number = 0
        self.response = ResponseObject(
            id=new_id("resp"),
            created_at=now(),
            status="in_progress",
            model=asked.model.name,
            output=[],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            tool_choice=body.tool_choice or "auto",
            tools=[one.model_dump() for one in body.tools or ()],
            text={"format": (body.text.format if body.text else None) or {"type": "text"}},
            reasoning={
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            user=body.user,
        )

    async def stream(self, ticket: Ticket) -> AsyncIterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(name, {"response": self.response})
        try:
            async for _, delta in ticket.deltas():
                for name, fields in self.items.take(delta.events):
                    yield self._event(name, fields)
                if delta.finish is not None:
                    for name, fields in self.end(delta.finish):
                        yield self._event(name, fields)
        except MkcError as error:
            told = answer_of(error).error
            self.response.status = "failed"
            self.response.error = ResponseError(code="server_error", message=told.message)
            yield self._event("failed", {"response": self.response})
            return
        yield self._event(str(self.response.status), {"response": self.response})

    def end(self, finish: Finish) -> list[tuple[str, dict[str, Any]]]:
        """Closes the items and the response."""
        cut = finish.reason is FinishReason.LENGTH
        told = list(self.items.close("incomplete" if cut else "completed"))
        usage = usage_of([finish], prompts=1)
        self.response.output = self.items.done
        self.response.status = "incomplete" if cut else "completed"
        self.response.incomplete_details = Incomplete(reason="max_output_tokens") if cut else None
        self.response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details or TokenDetails(cached_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokenDetails(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
            draft=usage.draft,
        )
        return told

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        kind = f"response.{name}"
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + to_json(body) + b"\n\n"
