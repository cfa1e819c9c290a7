"""The application: which function answers what, and its description."""

from __future__ import annotations

from collections.abc import Awaitable
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import MkcError
from serve.context import IGNORED
from serve.context import Server
from serve.failures import failure
from serve.gate import REQUEST_ID
from serve.gate import Gate
from serve.gate import error_response
from serve.openapi import describe
from serve.outcome import ClientGoneError
from serve.outcome import no_answer
from serve.route import Handler
from serve.route import Route
from serve.routes import page
from serve.routes import state
from serve.routes.chat import chat_completions
from serve.routes.completions import completions
from serve.routes.responses import responses
from serve.routes.state import DISTRIBUTION
from serve.routes.tokens import detokenize
from serve.routes.tokens import tokenize
from serve.schemas.chat import ChatCompletion
from serve.schemas.chat import ChatCompletionRequest
from serve.schemas.completions import Completion
from serve.schemas.completions import CompletionRequest
from serve.schemas.responses import ResponseObject
from serve.schemas.responses import ResponsesRequest
from serve.schemas.tokens import DetokenizeRequest
from serve.schemas.tokens import Health
from serve.schemas.tokens import Load
from serve.schemas.tokens import Model
from serve.schemas.tokens import Models
from serve.schemas.tokens import Text
from serve.schemas.tokens import TokenizeRequest
from serve.schemas.tokens import Tokens
from serve.schemas.tokens import Version

ROUTES = (
    Route(handler=state.health, paths=("/health", "/ping"), body=None, answer=Health),
    Route(handler=state.served_version, paths=("/version",), body=None, answer=Version),
    Route(handler=state.metrics, paths=("/metrics",), body=None, answer=None),
    Route(handler=state.load, paths=("/load",), body=None, answer=Load),
    Route(handler=state.models, paths=("/v1/models",), body=None, answer=Models),
    Route(handler=state.model, paths=("/v1/models/{name:path}",), body=None, answer=Model),
    Route(
        handler=completions,
        paths=("/v1/completions",),
        body=CompletionRequest,
        answer=Completion,
        streams=True,
    ),
    Route(
        handler=chat_completions,
        paths=("/v1/chat/completions",),
        body=ChatCompletionRequest,
        answer=ChatCompletion,
        streams=True,
    ),
    Route(
        handler=responses,
        paths=("/v1/responses",),
        body=ResponsesRequest,
        answer=ResponseObject,
        streams=True,
    ),
    Route(
        handler=tokenize,
        paths=("/tokenize", "/v1/tokenize"),
        body=TokenizeRequest,
        answer=Tokens,
    ),
    Route(
        handler=detokenize,
        paths=("/detokenize", "/v1/detokenize"),
        body=DetokenizeRequest,
        answer=Text,
    ),
)


PAGE = (("/", page.index), ("/static/{name}", page.static))  # for people, not for clients


def make_app(server: Server) -> FastAPI:
    """The application of a server. It needs nothing from the network to describe itself."""
    app = FastAPI(title="mkc serve", version=version(DISTRIBUTION), docs_url=None, redoc_url=None)
    for route in ROUTES:
        for path in route.paths:
            app.add_route(path, _bound(route.handler, server), methods=[route.method])
    for path, handler in PAGE:
        app.add_route(path, _bound(handler, server), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(MkcError, _refuse)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGoneError, _nobody)
    description = describe(app.title, app.version, ROUTES)
    app.openapi = lambda: description  # type: ignore[method-assign]
    settings = server.settings
    app.add_middleware(Gate, settings=settings)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # the official client for browsers adds some of its own
            expose_headers=[IGNORED, REQUEST_ID, "Retry-After"],
        )
    return app


def _bound(handler: Handler, server: Server) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(http: HttpRequest) -> Response:
        return await handler(server, http)

    return answer


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, MkcError)
    return error_response(error)


async def _nobody(http: HttpRequest, error: Exception) -> Response:
    return no_answer()


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path}: {error.detail}"
    body: Any = failure(error.status_code, message)
    return Response(
        body.json_bytes(),
        status_code=error.status_code,
        headers=error.headers,
        media_type="application/json",
    )
