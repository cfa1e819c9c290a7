"""The types of arguments, as schemas say them in different ways."""

from __future__ import annotations

from typing import Any

import pytest

from mkc.runtime.text.arguments import argument_types
from mkc.runtime.text.arguments import value_types

ROOT = {
    "$defs": {
        "Place": {"type": "object"},
        "Alias": {"$ref": "#/$defs/Place"},
        "Circle": {"$ref": "#/$defs/Circle"},
        "Tree": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Tree"}, {"type": "array"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": "integer"}, ("integer",)),
        ({"type": ["string", "null"]}, ("string", "null")),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ("boolean", "null")),
        ({"oneOf": [{"type": "number"}, {}]}, ("number", "string")),
        ({"enum": ["a", "b"]}, ("string",)),
        ({"enum": [1, 2.5, True, None]}, ("integer", "number", "boolean", "null")),
        ({"const": [1]}, ("array",)),
        ({"$ref": "#/$defs/Place"}, ("object",)),
        ({"$ref": "#/$defs/Alias"}, ("object",)),
        ({"$ref": "#/$defs/Circle"}, ("string",)),
        ({"$ref": "#/$defs/Tree"}, ("null", "array")),
        ({"$ref": "#/$defs/Nothing"}, ("string",)),
        ({}, ("string",)),
        (True, ("string",)),
    ],
)
def test_types_of_a_value(schema: Any, wanted: tuple[str, ...]) -> None:
    assert value_types(schema, ROOT) == wanted


def test_references_are_looked_up_in_the_tools_own_schema() -> None:
    parameters = {**ROOT, "properties": {"to": {"$ref": "#/$defs/Place"}, "note": {}}}
    tool = {"type": "function", "function": {"name": "go", "parameters": parameters}}
    assert argument_types([tool], "go") == {"to": ("object",), "note": ("string",)}
    assert argument_types([tool], "stop") == {}
