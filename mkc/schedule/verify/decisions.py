"""What a traced kernel decides by: the scalars on which its order may depend.

A launch shows one way through a kernel. Whether others exist that no launch has shown depends on
its comparisons, and on all other arithmetic of scalars that is not linear (a remainder, a minimum).
Each is written as a text, so that the ones of an edited kernel can be looked up among those of the
generated one.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

DECIDING = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "max", "min", "clamp", "rem", "div", "sign", "abs")
    + ("and", "or", "xor", "not", "select_n", "population_count", "clz")
    + ("shift_left", "shift_right_logical", "shift_right_arithmetic")
)
LONGEST = 200  # characters of a text; what is longer stands as its type


def decisions(kernel: Any) -> list[str]:
    """The scalar decisions of a traced kernel as texts, each once, in program order.

    A text names primitives, numbers and the types of arrays; the result of a decision stands in the
    next one as its type, since it is in the list itself.
    """
    found: dict[str, None] = {}
    _collect(kernel, [_type(one) for one in kernel.invars], found)
    return list(found)


def _collect(jaxpr: Any, arguments: Sequence[str], found: dict[str, None]) -> list[str]:
    """Adds the decisions of a body; returns the texts of its results."""
    texts = {one: _type(one) for one in jaxpr.constvars}
    texts.update(zip(jaxpr.invars, arguments, strict=True))

    def text(variable: Any) -> str:
        return _number(variable) if hasattr(variable, "val") else texts[variable]

    for equation in jaxpr.eqns:
        inputs = [text(one) for one in equation.invars]
        results = _results(equation, inputs, found)
        for variable, result in zip(equation.outvars, results, strict=True):
            short = not variable.aval.shape and len(result) <= LONGEST
            texts[variable] = result if short else _type(variable)
    return [text(one) for one in jaxpr.outvars]


def _results(equation: Any, inputs: Sequence[str], found: dict[str, None]) -> list[str]:
    name, params = equation.primitive.name, equation.params
    types = [_type(one) for one in equation.outvars]
    if name == "convert_element_type":
        return list(inputs)
    whole = f"{name}({', '.join(inputs)})"
    if name in DECIDING:
        if not any(map(_varies, inputs)):
            return [whole]
        if not equation.outvars[0].aval.shape:
            found[whole] = None
        return types
    if name == "while":
        conditions, body = params["cond_nconsts"], params["body_nconsts"]
        carried = _carried(inputs[conditions + body :])
        fixed = inputs[conditions : conditions + body]
        _collect(params["cond_jaxpr"].jaxpr, [*inputs[:conditions], *carried], found)
        _collect(params["body_jaxpr"].jaxpr, [*fixed, *carried], found)
        return types
    if name == "cond":
        for branch in params["branches"]:
            _collect(branch.jaxpr, inputs[1:], found)
        return types
    bodies = list(_bodies(params))
    for inner in bodies:
        same = len(inner.invars) == len(inputs)
        given = list(inputs) if same else [_type(one) for one in inner.invars]
        if name == "scan":
            given = _carried(given)
        results = _collect(inner, given, found)
        if len(bodies) == 1 and same and name != "scan":
            return results
    if bodies:
        return types
    return [whole if inputs else f"{whole} {one}" for one in types]


def _bodies(params: Any) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner


def _carried(texts: Sequence[str]) -> list[str]:
    """What a loop is given may change from iteration to iteration."""
    return [one if one.startswith("carried[") else f"carried[{one}]" for one in texts]


def _varies(text: str) -> bool:
    """Not made of numbers alone: types have brackets."""
    return "[" in text


def _number(literal: Any) -> str:
    if getattr(literal.val, "shape", ()):
        return _type(literal)
    return str(int(literal.val) if isinstance(literal.val, int) else literal.val)


def _type(variable: Any) -> str:
    return str(variable.aval).removeprefix("~")  # weak or not
