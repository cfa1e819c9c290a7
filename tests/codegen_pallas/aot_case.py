"""One kernel for ahead-of-time compilation, as the modules of cases write it down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel: its body, operands, results and scratch buffers.

    Attributes:
      body: called with the operand, result and scratch references.
      operands: abstract arrays and their memory spaces.
      results: the same for the results.
      aliases: operand number -> result number.
      barrier: the body uses the barrier semaphore; the compiler wants a collective id only then.
    """

    name: str
    body: Callable[..., None]
    operands: list[tuple[Any, Any]]
    results: list[tuple[Any, Any]]
    scratch: list[Any]
    aliases: dict[int, int] = field(default_factory=dict)
    barrier: bool = False


def types() -> tuple[Any, Any, Any, Any, Any]:
    """Of the libraries; imported late, because libtpu reads its options once."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    return jax, jnp, jax.ShapeDtypeStruct, pl, pltpu
