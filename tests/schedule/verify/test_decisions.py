"""What a kernel decides by is found wherever it stands, and arithmetic is none of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mkc.schedule.verify.decisions import decisions

POSITION = jax.ShapeDtypeStruct((), jnp.int32)
VECTOR = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def made(function: Any, *arguments: Any) -> list[str]:
    return decisions(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_a_comparison_is_told_with_its_numbers() -> None:
    assert made(lambda p: p + 1 == 7, POSITION) == ["eq(add(int32[], 1), 7)"]


def test_arithmetic_of_vectors_is_no_decision() -> None:
    assert made(lambda x: jnp.where(x > 0, jnp.maximum(x, 2.0), -x) % 3, VECTOR) == []


def test_linear_arithmetic_of_scalars_is_no_decision() -> None:
    assert made(lambda p: 3 * p - 1, POSITION) == []


def test_what_follows_from_numbers_is_no_decision() -> None:
    assert made(lambda p: p + jnp.where(jnp.int32(3) > 2, 1, 2), POSITION) == []


def test_decisions_inside_of_loops_and_branches() -> None:
    def body(index: Any, value: Any) -> Any:
        return lax.cond(value == 5, lambda: value + index % 3, lambda: value)

    found = made(lambda p: lax.fori_loop(0, p, body, p), POSITION)
    assert "lt(carried[0], carried[int32[]])" in found, "how often the loop runs"
    assert "eq(carried[int32[]], 5)" in found
    assert any(one.startswith("rem(carried[0], ") for one in found)


def test_a_function_of_its_own_is_looked_through() -> None:
    """`jnp` wraps much in functions; the numbers they are called with belong to the text."""
    inner = jax.jit(lambda p, number: p < number)
    assert made(lambda p: inner(p, 9), POSITION) == ["lt(int32[], 9)"]


def test_what_a_decision_decides_stands_as_its_type() -> None:
    assert made(lambda p: lax.rem(p, 16) == 3, POSITION) == [
        "rem(int32[], 16)",
        "eq(int32[], 3)",
    ]
