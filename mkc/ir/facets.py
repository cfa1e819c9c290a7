"""Facets: what the parts of the compiler know about an op, found by its type.

Shape inference, reference meaning and cost live in `mkc.ir`; sharding and emission are filled in by
the parts that own them. A user registers an op from outside the tree with `register_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from mkc.ir.ops import Op


@dataclass(frozen=True, kw_only=True)
class Facet:
    """A table from op type to function."""

    name: str
    table: dict[type[Op], Callable[..., Any]] = field(default_factory=dict)

    def register(self, op_type: type[Op]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: `@INFER.register(Linear)`."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            assert op_type not in self.table, f"{op_type.__name__} already has a {self.name} facet"
            self.table[op_type] = function
            return function

        return add

    def find(self, op: Op) -> Callable[..., Any] | None:
        return self.table.get(type(op))


INFER = Facet(name="shape inference")  # (op, operand types, state types) -> tuple of result types
REFERENCE = Facet(name="reference meaning")  # (op, operand arrays, states, context) -> arrays
COST = Facet(name="cost")  # (op, operand types, state types, result types) -> Cost
SHARD = Facet(name="sharding")  # see mkc.passes.p10_shard
EMIT = Facet(name="emission")  # see mkc.codegen_pallas
MNEMONICS: dict[str, type[Op]] = {}  # text form -> op type
