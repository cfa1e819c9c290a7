"""The generated kernel as text: golden files, and that every graph gives Python that compiles."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

import mkc
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.pipeline import Lowered
from mkc.runtime.kernel import load_module
from mkc.targets import load_target
from tests.golden.fixture import GoldenCheck
from tests.passes.lowering import CASES
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.lowering import two_dense_layers
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack


def source_of(one: Lowered) -> str:
    return kernel_source(one.program, one.steps, target=load_target(TARGET))


def test_dense_example(golden: GoldenCheck) -> None:
    golden("kernel/dense.py.txt", source_of(two_dense_layers()))


def test_lane_model_on_two_ranks(golden: GoldenCheck) -> None:
    golden("kernel/qwen38_lane_tp2.py.txt", source_of(lowered("qwen38_lane", 2)))


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_kernel_is_a_module(name: str, ranks: int) -> None:
    """It imports jax and the support module, and says what it is called with."""
    one = lowered(name, ranks)
    source = source_of(one)
    imported = {
        node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported == {
        "__future__", "functools", "typing", "jax", "jax.numpy", "mkc.codegen_pallas",
    }  # fmt: skip
    spec = load_module(source).SPEC
    assert [operand.name for operand in spec.operands] == [
        operand.name for operand in one.program.operands
    ]
    assert [operand.updated for operand in spec.operands] == [
        operand.updated for operand in one.program.operands
    ]
    assert spec.ranks == ranks


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_phase_is_one_function_that_is_called_once(name: str, ranks: int) -> None:
    """Loop bodies are written once, however often they run."""
    one = lowered(name, ranks)
    tree = ast.parse(source_of(one))
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    calls = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    numbered = [phase.id for phase in one.program.phases() if phase.id[1:].isdigit()]
    assert numbered
    for id in numbered:
        (function,) = [found for found in defined if found.split("_")[0] == id]
        assert calls.count(function) == 1


@given(STACKS, strategies.sampled_from([1, 2, 8]))
@settings(max_examples=25, deadline=None)
def test_random_stacks_compile(stack: Stack, ranks: int) -> None:
    load_module(source_of(lower(stack.graph(), ranks)))


def named(first: str, second: str) -> Callable[[mkc.Step], mkc.Outputs]:
    """A model whose projections have these names."""

    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [512, 256]))
        x = mkc.linear(h, mkc.param(f"{first}.weight", [256, 256]))
        y = mkc.linear(h, mkc.param(f"{second}.weight", [256, 256]))
        h = mkc.rms_norm(x + y, mkc.param(f"{second}.norm", [256]), eps=1e-6)
        return mkc.next_token(h, mkc.param("head.weight", [512, 256]))

    return function


@pytest.mark.parametrize(
    ("first", "second"),
    [("in", "lambda"), ("m", "c"), ("page", "slot"), ("support", "jnp"), ("w_norm", "constant_0")],
)
def test_names_of_weights_hide_nothing(first: str, second: str) -> None:
    """Values are named after their weights, and a weight may be called like anything."""
    graph = mkc.trace(named(first, second), name="named", batch=1, context=64)
    tree = ast.parse(source_of(lower(graph, 1)))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    (vector,) = [node for node in functions if "rms_norm" in node.name]
    assigned = [
        name.id
        for node in ast.walk(vector)
        if isinstance(node, ast.Assign)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    ]
    assert len(assigned) == len(set(assigned)), assigned
    assert {"m", "c", "support", "jnp"}.isdisjoint(assigned)
