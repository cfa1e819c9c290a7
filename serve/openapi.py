"""The OpenAPI document, made of the same models that read and write the bodies."""

from __future__ import annotations

from collections.abc import Sequence
from re import sub
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from pydantic.json_schema import models_json_schema

from serve.route import Route
from serve.schemas.base import ErrorAnswer

REFERENCE = "#/components/schemas/{model}"
ERRORS = {
    "400": "A field is wrong, or cannot be honoured; `param` names it.",
    "401": "There is no API key that is known.",
    "404": "The model is not served here.",
    "408": "The request took too long.",
    "413": "The body is too large.",
    "429": "The queue is full; see `Retry-After`.",
    "500": "The server failed.",
    "503": "The server is loading or ending; see `Retry-After`.",
}
JSON = "application/json"
EVENT = {  # of a stream; its data is a piece of the answer as JSON, or the word [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def describe(title: str, version: str, routes: Sequence[Route]) -> dict[str, Any]:
    """The document."""
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (route.body, "validation") for route in routes if route.body is not None
    ]
    answers: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (route.answer, "validation") for route in routes if route.answer is not None
    ]
    used: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *bodies,
        *answers,
        (ErrorAnswer, "validation"),
    ]
    _, definitions = models_json_schema(used, ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for route in routes:
        for path in route.paths:
            shown = sub(r"\{(\w+):path\}", r"{\1}", path)
            paths.setdefault(shown, {})[route.method.lower()] = _operation(route, shown)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    doc = (route.handler.__doc__ or "").strip()
    content: dict[str, Any] = {}
    if route.answer is not None:
        content[JSON] = {"schema": _reference(route.answer)}
    else:
        content["text/plain"] = {"schema": {"type": "string"}}
    if route.streams:
        content["text/event-stream"] = {"schema": EVENT}
    found: dict[str, Any] = {
        "operationId": sub(r"\W+", "_", path).strip("_") + f"_{route.method.lower()}",
        "summary": doc,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                status: {
                    "description": text,
                    "content": {JSON: {"schema": _error_schema(route, status)}},
                }
                for status, text in ERRORS.items()
            },
        },
    }
    if "{name}" in path:
        found["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if route.body is not None:
        found["requestBody"] = {
            "required": True,
            "content": {JSON: {"schema": _reference(route.body)}},
        }
    return found


def _error_schema(route: Route, status: str) -> dict[str, Any]:
    """A server that is not ready says so of its health in the form of its health."""
    says_itself = status == "503" and route.answer is not None and "/health" in route.paths
    return _reference(route.answer if says_itself and route.answer else ErrorAnswer)


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
