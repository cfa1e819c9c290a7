"""Graphs, ops and text forms that do not make sense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import at
from mkc.errors.base import listed
from mkc.errors.base import sentence


class UnsupportedOpError(MkcError):
    """A part of the compiler has no function for an op."""

    code: ClassVar[str] = "E180"

    def __init__(self, *, op: str, facet: str, location: Place | None = None) -> None:
        super().__init__(
            f"{at(location)}op '{op}' has no {facet}; expected a function registered for it. "
            f"Pass one to mkc.ir.register.register_op, or write the model without the op."
        )


class TextError(MkcError):
    """Text that does not parse as a graph."""

    code: ClassVar[str] = "E190"

    def __init__(
        self, *, line: int, column: int, expected: str, got: str, file: Place = "graph text"
    ) -> None:
        self.line = line
        self.column = column
        super().__init__(
            f"{file}:{line}:{column}: expected {expected}, got {got}. "
            f"Correct the text at this place; docs/graph-ir.md describes the form."
        )


class PassSpecError(MkcError):
    """Text that does not parse as a pipeline of passes, or names what does not exist."""

    code: ClassVar[str] = "E191"

    def __init__(self, *, text: str, problem: str, known: Iterable[str] = ()) -> None:
        choices = listed("known", known)
        super().__init__(
            f"pass pipeline '{text}': {problem}.{choices} "
            f"Write it as name{{option=value,...}},name,..."
        )


class RegistrationError(MkcError):
    """An op from outside the tree that cannot be registered."""

    code: ClassVar[str] = "E192"

    def __init__(self, *, op: str, problem: str, hint: str) -> None:
        super().__init__(f"cannot register op '{op}': {problem}. {sentence(hint)}")


# Graphs.


class ShapeError(MkcError):
    """Operands of an op do not fit together."""

    code: ClassVar[str] = "E201"

    def __init__(
        self, *, op: str, location: Place | None, expected: str, got: str, hint: str
    ) -> None:
        super().__init__(f"{at(location)}{op}: expected {expected}, got {got}. {sentence(hint)}")
        self.op = op
        self.location = location
        self.expected = expected
        self.got = got
        self.hint = hint

    def at(self, location: Place) -> ShapeError:
        """The same error with a place."""
        return ShapeError(
            op=self.op, location=location, expected=self.expected, got=self.got, hint=self.hint
        )


class GraphError(MkcError):
    """A graph that the verifier rejects."""

    code: ClassVar[str] = "E202"

    def __init__(
        self, *, op: str, location: Place | None, problem: str, expected: str, hint: str
    ) -> None:
        super().__init__(f"{at(location)}{op}: {problem}; expected {expected}. {sentence(hint)}")


class TraceError(MkcError):
    """The model's Python uses the tracing interface in a way that builds no graph."""

    code: ClassVar[str] = "E203"

    def __init__(
        self, *, where: str, location: Place | None, problem: str, expected: str, hint: str
    ) -> None:
        super().__init__(f"{at(location)}{where}: {problem}; expected {expected}. {sentence(hint)}")


class ParamNameError(MkcError):
    """A parameter or state name that cannot be told from another."""

    code: ClassVar[str] = "E204"

    def __init__(self, *, name: str, location: Place | None, problem: str, hint: str) -> None:
        super().__init__(f"{at(location)}'{name}': {problem}. {sentence(hint)}")


class UnsupportedGraphError(MkcError):
    """A graph that means something, but that the kernel compiler cannot do."""

    code: ClassVar[str] = "E181"

    def __init__(self, *, op: str, location: Place | None, problem: str, hint: str) -> None:
        super().__init__(f"{at(location)}{op}: {problem}. {sentence(hint)}")
