"""Traced programs, prepared for being executed many times: by every rank, in every loop."""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

type Value = Any
"""A scalar, a `View`, or UNKNOWN."""


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()

OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
    "neg": operator.neg,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "xor": operator.xor,
    "abs": abs,
    "div": lambda a, b: int(a / b) if isinstance(a, int) else a / b,
    "rem": lambda a, b: a - int(a / b) * b,
    "select_n": lambda which, *cases: cases[int(which)],
    "and": lambda a, b: a and b if isinstance(a, bool) else a & b,
    "or": lambda a, b: a or b if isinstance(a, bool) else a | b,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "squeeze": lambda a: a,
    "reshape": lambda a: a,
    "broadcast_in_dim": lambda a: a,
    "reshard": lambda a: a,
    "stop_gradient": lambda a: a,
    "copy": lambda a: a,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One equation.

    Attributes:
      inputs, outputs: keys of values.
      body: what it executes, None for a primitive.
      has_effects: it does more than to compute its results.
      is_scalar: all its results are scalars.
    """

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    body: Any
    has_effects: bool
    is_scalar: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """A traced program.

    Attributes:
      literals: values that are written in it, by key.
      results: keys of its results.
    """

    literals: Mapping[Any, Value]
    arguments: tuple[Any, ...]
    steps: tuple[Step, ...]
    results: tuple[Any, ...]


_BODIES: WeakKeyDictionary[Any, Body] = WeakKeyDictionary()


def prepared(jaxpr: Any) -> Body:
    """The body of a jaxpr; its constants are the first arguments."""
    found = _BODIES.get(jaxpr)
    if found is None:
        found = _BODIES[jaxpr] = _prepare(jaxpr)
    return found


def _prepare(jaxpr: Any) -> Body:
    literals: dict[Any, Value] = {}

    def key(variable: Any) -> Any:
        if not hasattr(variable, "val"):
            return variable
        literals[id(variable)] = known_value(variable.val)
        return id(variable)

    steps = tuple(
        Step(
            name=one.primitive.name,
            params=one.params,
            inputs=tuple(map(key, one.invars)),
            outputs=tuple(one.outvars),
            body=one.params.get("jaxpr") or one.params.get("call_jaxpr"),
            has_effects=bool(one.effects),
            is_scalar=all(not result.aval.shape for result in one.outvars),
        )
        for one in jaxpr.eqns
    )
    return Body(
        literals=literals,
        arguments=(*jaxpr.constvars, *jaxpr.invars),
        steps=steps,
        results=tuple(map(key, jaxpr.outvars)),
    )


def known_value(value: Any) -> Value:
    """A literal or a constant; of arrays nothing is known."""
    if getattr(value, "shape", ()):
        return UNKNOWN
    kind = str(getattr(value, "dtype", type(value).__name__))
    return bool(value) if "bool" in kind else int(value) if "int" in kind else float(value)
