"""The page at `/`, and the files that it needs: nothing of it comes from another server."""

from __future__ import annotations

from importlib.resources import files

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serve.context import Server

PAGE = files("serve") / "page"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("page.css", "page.js")
NOT_FOUND = 404
# What pages may do: fetch from this server only, and nothing that is written inside a chat.
RULES = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "frame-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PICTURE_RULES = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"
)


async def index(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /`."""
    return _file("index.html")


async def static(server: Server, http: HttpRequest) -> Response:
    """Answers `GET /static/{name}`: a file of the page, or a picture of the running kernel."""
    name = http.path_params["name"]
    if name in FILES:
        return _file(name)
    model = server.engine.model
    if model is not None and model.pictures is not None and name in model.pictures.names:
        drawn = await run_in_threadpool(model.pictures.draw)
        return _response(drawn[name], name, PICTURE_RULES)
    raise HTTPException(NOT_FOUND, "there is no such file")


def _file(name: str) -> Response:
    return _response((PAGE / name).read_bytes(), name, RULES)


def _response(content: bytes, name: str, rules: str) -> Response:
    headers = {
        "Content-Security-Policy": rules,
        "Cache-Control": "no-cache",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(content, headers=headers, media_type=KINDS[name.rpartition(".")[2]])
