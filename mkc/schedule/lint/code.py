"""Lint of a kernel's text, and of what Pallas traced from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from mkc.schedule.lint.offsets import runtime_places
from mkc.schedule.lint.rules import issue
from mkc.schedule.verify.issue import Issue

KERNEL = "kernel.py"
IMPORTS = frozenset({"__future__", "functools", "jax", "math", "typing"})
SUPPORT = "mkc.codegen_pallas"
NO_LOWERING = frozenset({"sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


def lint_source(text: str) -> list[Issue]:
    """What the text of a kernel says: imports and loops."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [issue("L207", f"{KERNEL}:{error.lineno}", str(error.msg))]
    return list(_source(tree))


def _source(tree: ast.Module) -> Iterator[Issue]:
    imported = _imported(tree)
    for node in ast.walk(tree):
        where = f"{KERNEL}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for one in node.names:
                if one.name.split(".")[0] not in IMPORTS and not one.name.startswith(SUPPORT):
                    yield issue("L206", where, f"imports {one.name}")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] not in IMPORTS and not module.startswith(SUPPORT):
                yield issue("L206", where, f"imports {module}")
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            if _name(node).partition(".")[0] in imported:
                yield issue("L206", where, f"changes {_name(node)}")
        elif isinstance(node, ast.Call) and _name(node.func) in (
            "setattr",
            "delattr",
            "exec",
            "eval",
        ):
            yield issue("L206", where, f"calls {_name(node.func)}")
        elif isinstance(node, ast.Call) and _name(node.func).endswith("fori_loop"):
            yield from _loop(node, where)
        elif isinstance(node, ast.Call):
            last = _name(node.func).rpartition(".")[2]
            if last in NO_LOWERING or last in ("argsort", "lexsort"):
                yield issue("L204", where, f"calls {_name(node.func)}")


def _imported(tree: ast.Module) -> set[str]:
    """Names of what the text imports."""
    return {
        (one.asname or one.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }


def _loop(node: ast.Call, where: str) -> Iterator[Issue]:
    for keyword in node.keywords:
        if keyword.arg != "unroll":
            continue
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if value not in (True, False, 1):
            yield issue("L205", where, f"unroll={ast.unparse(keyword.value)}")


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def lint_traced(kernel: Any, hints: list[str]) -> list[Issue]:
    """What Pallas traced: primitives and their parameters; `hints` are those that are not true."""
    found = [issue("L201", KERNEL, one) for one in hints]
    places = runtime_places(kernel)
    found += [issue("L208", KERNEL, one) for one in places.rows]
    found += [issue("L209", KERNEL, one) for one in places.views]
    return list(dict.fromkeys([*found, *_traced(kernel)]))


def _moves(reshape: Any) -> bool:
    """Not only dimensions of size one come and go."""
    (source, *_), (target,) = reshape.invars, reshape.outvars
    before, after = ([one for one in x.aval.shape if one != 1] for x in (source, target))
    return before != after


def _traced(jaxpr: Any) -> Iterator[Issue]:
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in NO_LOWERING or (name == "top_k" and params.get("is_stable", True)):
            yield issue("L204", KERNEL, f"the primitive {name}")
        if name == "dma_start" and params["priority"]:
            *_, peer = params["tree"].unflatten(equation.invars)
            if peer is not None:
                yield issue("L202", KERNEL, f"a copy to a peer has priority {params['priority']}")
        for variable in equation.outvars:
            kind = str(getattr(variable.aval, "dtype", ""))
            if kind.startswith("uint") and variable.aval.shape:
                yield issue("L203", KERNEL, f"{name} makes a vector of {kind}")
            if name == "reshape" and kind == "bool" and _moves(equation):
                shapes = f"{equation.invars[0].aval.shape} becomes {variable.aval.shape}"
                yield issue("L210", KERNEL, f"a vector of booleans of shape {shapes}")
        for value in params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                body = getattr(inner, "jaxpr", inner)
                if hasattr(body, "eqns"):
                    yield from _traced(body)
