"""Many made-up schemas through the engine, with drafts: every output that ends is of its form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from json import loads
from random import Random
from typing import Any

from jsonschema import Draft202012Validator

from mkc.runtime.request import Output
from mkc.runtime.request import Request
from mkc.runtime.text import joined
from serve.engine import Engine
from serve.outcome import joined_output
from serve.routes.chat import requests_of
from serve.schemas.base import read_body
from serve.schemas.chat import ChatCompletionRequest
from tests.serve.running import SECONDS
from tests.serve.running import Running

SCHEMAS = 200
NAMES = ("a", "kind", "x1", "the name", "ü")


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose outputs are short."""
    scalars: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"type": "integer", "minimum": random.randint(-20, 0), "maximum": 300},
        lambda: {"type": "string", "maxLength": random.randint(0, 6)},
        lambda: {"type": "string", "pattern": random.choice(["^[a-c]{1,3}$", "^x?[0-9]{2}$"])},
        lambda: {"enum": random.sample(["red", "blue", 1, 19, None, True, "a b"], 3)},
        lambda: {"const": random.choice(["19", 7, {"a": []}])},
    ]
    if depth == 0:
        return random.choice(scalars)()

    def inner() -> dict[str, Any]:
        return random_schema(random, depth - 1)

    def record() -> dict[str, Any]:
        names = random.sample(NAMES, random.randint(1, 3))
        needed = [one for one in names if random.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: inner() for name in names},
            "required": needed,
            "additionalProperties": False,
        }

    parts: list[Callable[[], dict[str, Any]]] = [
        *scalars,
        record,
        record,
        record,
        lambda: {"type": "array", "items": inner(), "minItems": 1, "maxItems": 3},
        lambda: {"type": "array", "prefixItems": [inner(), inner()], "items": False},
        lambda: {"anyOf": [inner(), inner()]},
    ]
    return random.choice(parts)()


def request(number: int, schema: dict[str, Any], model: Any) -> Request:
    """Greedy ones, and ones that sample in several ways."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.3, "min_p": 0.02},
    ]
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        "max_tokens": 150,
        "seed": number,
        **ways[number % len(ways)],
    }
    (found,) = requests_of(read_body(ChatCompletionRequest, body, lenient=False)[0], model)
    return found


def outputs(engine: Engine, requests: list[Request]) -> list[Output]:
    """Of all requests at once, each in a ticket of its own."""

    async def one(request: Request) -> Output:
        ticket = engine.submit([request], owner="a")
        return joined_output([delta async for _, delta in ticket.deltas()])

    async def all_of_them() -> list[Output]:
        return await asyncio.wait_for(asyncio.gather(*map(one, requests)), 10 * SECONDS)

    return asyncio.run(all_of_them())


def test_every_output_is_of_its_form_with_drafts(tiny: Running) -> None:
    random = Random(7)
    schemas = [random_schema(random) for _ in range(SCHEMAS)]
    model = tiny.engine.ready_model()
    requests = [request(number, schema, model) for number, schema in enumerate(schemas)]
    found = outputs(tiny.engine, requests)
    ended, drafts = 0, {True: [0, 0], False: [0, 0]}
    for asked, schema, output in zip(requests, schemas, found, strict=True):
        counts = drafts[asked.sampling.temperature == 0]
        counts[0] += output.finish.statistics.drafted
        counts[1] += output.finish.statistics.accepted
        if output.finish.reason == "stop":
            ended += 1
            Draft202012Validator(schema).validate(loads(joined(output.events).content))
        else:
            assert output.finish.reason == "length"
    assert ended > 0.9 * SCHEMAS
    for drafted, accepted in drafts.values():  # of those that sample, and of the greedy ones
        assert drafted > accepted > 0
