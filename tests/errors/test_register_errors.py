"""Ops from outside the tree that cannot be registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import ClassVar

import pytest

from mkc.errors import RegistrationError
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.ops import Op
from mkc.ir.ops import Scale
from mkc.ir.register import register_op
from mkc.ir.register import unregister_op
from tests.errors.expect import refused


@dataclass(frozen=True, kw_only=True)
class Good(Op):
    mnemonic: ClassVar[str] = "test.good"


@dataclass(frozen=True, kw_only=True)
class SameMnemonic(Op):
    mnemonic: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True)
class Reserved(Op):
    mnemonic: ClassVar[str] = "repeat"


@dataclass(frozen=True, kw_only=True)
class NoMnemonic(Op):
    size: int = 0


class Plain(Op):
    mnemonic: ClassVar[str] = "test.plain"


@dataclass(frozen=True, kw_only=True)
class Inherits(Scale):
    pass


def anything(*arguments: object) -> tuple[object, ...]:
    return arguments


def register(op_type: Any, infer: Callable[..., Any] | None = anything) -> None:
    register_op(op_type, infer=infer, reference=anything)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> object:
    mnemonics, inferred = dict(MNEMONICS), dict(INFER.table)
    yield
    assert mnemonics == MNEMONICS
    assert inferred == INFER.table


def test_registered_twice() -> None:
    register(Good)
    try:
        with refused(RegistrationError, "'Good'", "already belongs to", "register each op once"):
            register(Good)
    finally:
        unregister_op(Good)


def test_function_for_an_op_that_has_one() -> None:
    INFER.register(Good)(anything)
    try:
        with refused(RegistrationError, "'Good'", "already has a shape inference", "to that call"):
            register(Good)
    finally:
        del INFER.table[Good]


def test_mnemonic_of_a_built_in_op() -> None:
    with refused(
        RegistrationError, "'SameMnemonic'", "'linear'", "mkc.ir.ops.Linear", "another mnemonic"
    ):
        register(SameMnemonic)


def test_mnemonic_that_the_text_form_needs() -> None:
    with refused(RegistrationError, "'repeat' cannot stand in the text form", "none of batch,"):
        register(Reserved)


@pytest.mark.parametrize("op_type", [NoMnemonic, Inherits])
def test_no_mnemonic_of_its_own(op_type: type[Op]) -> None:
    with refused(RegistrationError, op_type.__name__, "no mnemonic of its own", "ClassVar[str]"):
        register(op_type)


def test_not_a_dataclass() -> None:
    with refused(RegistrationError, "'Plain'", "not a frozen dataclass", "@dataclass(frozen=True"):
        register(Plain)


@pytest.mark.parametrize("other", [int, "linear"])
def test_not_an_op(other: object) -> None:
    with refused(RegistrationError, "not a subclass of mkc.ir.ops.Op", "Derive the class from Op"):
        register(other)


def test_no_shape_inference() -> None:
    with refused(RegistrationError, "'Good'", "'infer' is None", "pass both functions"):
        register(Good, infer=None)


def test_attribute_type_that_is_nowhere() -> None:
    class Hidden:
        pass

    @dataclass(frozen=True, kw_only=True)
    class Local(Op):
        mnemonic: ClassVar[str] = "test.local"
        inner: Hidden

    with refused(RegistrationError, "'Local'", "inner", "do not resolve", "at module level"):
        register(Local)
