"""The OpenAPI document: valid, complete, and true of requests that are made from it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings
from openapi_spec_validator import validate
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import content_type_conformance
from schemathesis.specs.openapi.checks import response_schema_conformance
from schemathesis.specs.openapi.checks import status_code_conformance

from serve.app import ROUTES
from tests.serve.running import Running

EXAMPLES = 15  # requests for each endpoint
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def document(fake: Running) -> dict[str, Any]:
    return fake.ask("/openapi.json").json()  # type: ignore[no-any-return]


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    validate(document)


def test_every_route_is_in_it(document: dict[str, Any]) -> None:
    paths = {path.replace(":path", "") for route in ROUTES for path in route.paths}
    assert set(document["paths"]) == paths


def test_unknown_fields_are_not_in_it(document: dict[str, Any]) -> None:
    """So that a client made from it cannot send one."""
    for name in ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest", "Message"):
        assert document["components"]["schemas"][name]["additionalProperties"] is False


@pytest.mark.parametrize("path", sorted({one.paths[0] for one in ROUTES}))
def test_requests_made_from_it_are_answered_as_it_says(
    fake: Running, document: dict[str, Any], path: str
) -> None:
    """Good ones and bad ones; none of them is an error of the server."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=fake.url)
    shown = path.replace(":path", "")
    (method,) = document["paths"][shown]
    operation = schema[shown][method.upper()]

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @schemathesis.pytest.hypothesis_given(operation) if False else _given(operation)
    def check(case: Any) -> None:
        response = case.call()
        case.validate_response(response, checks=CHECKS)

    check()
    assert fake.ask("/health").status_code == 200


def _given(operation: Any) -> Any:
    from hypothesis import given

    return given(case=operation.as_strategy())
