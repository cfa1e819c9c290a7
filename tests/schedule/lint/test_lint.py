"""Each rule of the lint is seen to fail, and sound programs and kernels pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.ir.types import DType
from mkc.schedule.lint import LINTS
from mkc.schedule.lint import lint_program
from mkc.schedule.lint import lint_source
from mkc.schedule.lint import lint_traced
from mkc.schedule.lint.program import few_rounds
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.trace import pallas_kernel
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from mkc.targets import load_target
from tests.mutation.edits import with_one
from tests.mutation.edits import with_phases
from tests.mutation.subjects import subject
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.schedule.verify.traced import module_of
from tests.schedule.verify.traced import trace


@pytest.mark.parametrize(
    "name",
    ["one", "two", "eight", "dense", "shares", "rounds", "meets", "draft", "drafts", "gathers"],
)
def test_sound_programs(name: str) -> None:
    assert lint_program(subject(name), load_target(TARGET)) == []


def test_a_generated_kernel() -> None:
    lowered = lower(golden_graph("qwen38_lane"), 2)
    module = module_of(lowered)
    kernel = trace(module)
    tracer = tracer_of(lowered.program, 1, cases_of(lowered.program)[0])
    tracer.run(kernel, reference_names(module.SPEC))
    assert lint_traced(kernel, tracer.hints) == []


def with_operand(program: Program, role: str, **changes: Any) -> Program:
    operands = with_one(program.operands, lambda one: one.role == role, **changes)
    return replace(program, operands=operands)


def odd_loads(program: Program) -> Program:
    tape = program.tape
    return replace(program, tape=replace(tape, prologue=(tape.prologue[0] - 8, *tape.prologue[1:])))


def odd_message_rows(program: Program) -> Program:
    plans = with_one(program.exchanges, lambda one: one.kind == "one_shot", rows=2)
    return replace(program, exchanges=plans)


def narrow_message(program: Program) -> Program:
    plans = with_one(program.exchanges, lambda one: one.kind == "one_shot", columns=64)
    return replace(program, exchanges=plans)


def half_a_register_per_rank(program: Program) -> Program:
    """The shares of a sum begin inside of a register."""

    def narrower(phase: Phase) -> Phase:
        if isinstance(phase, AllReducePhase):
            moved = replace(phase.partial, start=phase.partial.start + 64)
            return replace(phase, partial=moved)
        return phase

    return with_phases(program, narrower)


def two_row_buffer(program: Program) -> Program:
    rows = with_one(program.buffers, lambda one: True, shape=(2, program.buffers[0].shape[1]))
    return replace(program, buffers=rows)


def tiny_items(program: Program) -> Program:
    streams = with_one(program.streams, lambda one: True, item_shape=(8, 8))
    array = streams[0].array
    operands = with_one(
        program.operands, lambda one: one.name == array, shape=(streams[0].items, 8, 8)
    )
    return replace(program, streams=streams, operands=operands)


def surplus_operand(program: Program) -> Program:
    spare = replace(program.operands[-1], name="spare")
    return replace(program, operands=(*program.operands, spare))


def float_tokens(program: Program) -> Program:
    return with_operand(program, "tokens", dtype=DType.F32)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("L101", odd_loads),
        ("L103", odd_message_rows),
        ("L103", narrow_message),
        ("L104", tiny_items),
        ("L105", two_row_buffer),
        ("L106", surplus_operand),
        ("L107", float_tokens),
    ],
)
def test_programs(code: str, change: Callable[[Program], Program]) -> None:
    assert code in {one.code for one in lint_program(change(subject("two")), load_target(TARGET))}


def test_lanes_that_are_scattered() -> None:
    program = half_a_register_per_rank(subject("shares"))
    assert "L102" in {one.code for one in lint_program(program, load_target(TARGET))}


def test_rounds_that_are_left_out_copy_the_same() -> None:
    """A launch may have hundreds of thousands of rounds; a few of them show all copies."""
    program = lower(dense_graph(batch=2), 2, "lower{rounds=12}").program
    case = cases_of(program)[0]
    few = few_rounds(case)
    assert few.ran < case.ran

    def copies(case: Case) -> set[tuple[Place, Place]]:
        events = expected_events(program, 0, case)
        return {(one.source, one.target) for one in events if isinstance(one, Start | Send)}

    assert copies(few) == copies(case)


@pytest.mark.parametrize(("rows", "codes"), [(16, set()), (8, {"L108"})])
def test_copies_inside_vmem(rows: int, codes: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No phase makes one today; of bf16 blocks they need whole tiles."""
    program = subject("two")
    cache = replace(program.caches[0], batch=2)
    program = replace(program, caches=(cache,))
    source, target = (
        Place(array=f"{cache.name}_{part}_new", index=(0,), first=0, count=rows)
        for part in ("key", "value")
    )
    copy = Start(
        phase="p00", routine="spare", source=source, target=target, semaphore=("spare", (0,))
    )
    monkeypatch.setattr("mkc.schedule.lint.program.expected_events", lambda *_: [copy])
    found = {one.code for one in lint_program(program, load_target(TARGET))}
    assert {one for one in found if one == "L108"} == codes


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("L205", "lax.fori_loop(0, 8, body, 0, unroll=4)"),
        ("L204", "jnp.sort(x)"),
        ("L204", "jnp.cumsum(x)"),
        ("L206", "import os"),
        ("L206", "from pathlib import Path"),
        ("L206", "from mkc.codegen_pallas import support\nsupport.tape_wait = None"),
        ("L206", "setattr(m, 'tape', None)"),
        ("L207", "def step(m:"),
    ],
)
def test_texts(code: str, text: str) -> None:
    assert [one.code for one in lint_source(text)] == [code]


@pytest.mark.parametrize(
    "text",
    [
        "from mkc.codegen_pallas import support",
        "lax.fori_loop(0, 8, body, 0, unroll=True)",
        "import jax.numpy as jnp",
    ],
)
def test_texts_that_are_fine(text: str) -> None:
    assert lint_source(text) == []


def traced(body: Callable[..., None], dtype: Any = jnp.int32) -> Any:
    def launch(x: jax.Array) -> jax.Array:
        return pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            interpret=pltpu.InterpretParams(),
        )(x)

    return pallas_kernel(jax.make_jaxpr(launch)(jnp.zeros((8, 128), dtype)))


def test_unsigned_vectors() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...] + 1

    kernel = traced(body, jnp.uint32)
    assert {one.code for one in lint_traced(kernel, [])} == {"L203"}
    assert lint_traced(traced(body), []) == []


def test_primitives_without_lowering() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = jnp.cumsum(x[...], axis=1)

    assert "L204" in {one.code for one in lint_traced(traced(body), [])}


def test_untrue_hints() -> None:
    def body(x: Any, out: Any) -> None:
        out[...] = x[...]

    (found,) = lint_traced(traced(body), ["24 is no multiple of 16"])
    assert found.code == "L201"
    assert found.hint == LINTS["L201"].hint
