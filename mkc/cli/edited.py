"""What an edited `kernel.py` allocates and how it is launched, beside the generated one."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any

from mkc.codegen_pallas.support import KernelSpec

LAUNCH = ("build", "abstract_arguments")
LISTS = ("operands", "scratch")


def launch_differences(generated: ModuleType, edited: ModuleType) -> list[str]:
    """Everything in which two kernels differ around their body: what was proven of one, with its
    arrays, semaphores and limits, is not proven of the other then. Empty when they are the same.
    """
    found = list(_spec_differences(generated.SPEC, edited.SPEC))
    for name in LAUNCH:
        if _code(getattr(generated, name)) != _code(getattr(edited, name)):
            found.append(f"{name}() is not the generated one")
    return found


def _spec_differences(generated: KernelSpec, edited: KernelSpec) -> Iterator[str]:
    for field in fields(KernelSpec):
        mine, other = getattr(generated, field.name), getattr(edited, field.name)
        if field.name not in LISTS and mine != other:
            yield f"{field.name}: expected {mine}, found {other}"
    problems = [
        *_different("operand", _operands(generated), _operands(edited)),
        *_different("scratch", _scratch(generated), _scratch(edited)),
    ]
    yield from problems
    for name in LISTS:
        if not problems and list(getattr(generated, name)) != list(getattr(edited, name)):
            yield f"{name} are in another order, or more than once"


def _different(what: str, mine: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*mine, *other)):
        expected, found = mine.get(name, "nothing"), other.get(name, "nothing")
        if expected != found:
            yield f"{what} {name}: expected {expected}, found {found}"


def _operands(spec: KernelSpec) -> dict[str, str]:
    return {
        one.name: f"{one.shape} {one.dtype} {one.role}" + (", updated" if one.updated else "")
        for one in spec.operands
    }


def _scratch(spec: KernelSpec) -> dict[str, str]:
    return {name: f"{shape} {kind}" for name, kind, shape in spec.scratch}


def _code(function: Any) -> tuple[Any, ...] | None:
    code = getattr(function, "__code__", None)
    defaults = getattr(function, "__defaults__", None)
    return code and (code.co_code, code.co_names, code.co_consts, code.co_varnames, defaults)
