"""Which layers store their stream: the kernel does what the program says, one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import mkc
from mkc.passes.pipeline import Lowered
from mkc.schedule.counted import places
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.verify import prove
from mkc.schedule.verify.case import launches_of
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.schedule.verify.test_protocol import compare
from tests.schedule.verify.traced import module_of
from tests.schedule.verify.traced import trace

VOCAB, HIDDEN, LAYERS, PERIOD, SLOTS = 512, 256, 14, 3, 5


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Every fourth layer has a larger matrix, so layers fold with a period that does not divide
    that of the stores."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    blocks = mkc.residual_blocks(h, SLOTS, period=PERIOD)
    for layer in mkc.layers(LAYERS):
        x = mkc.mix_blocks(
            blocks,
            h,
            norm=layer.param("norm.weight", [HIDDEN]),
            projection=layer.param("proj.weight", [1, HIDDEN]),
            eps=1e-5,
        )
        blocks, h = mkc.store_block(blocks, h)
        name, width = ("wide", 2 * HIDDEN) if layer.index % 4 == 3 else ("narrow", HIDDEN)
        up = mkc.silu(mkc.linear(x, layer.param(f"{name}.up.weight", [width, HIDDEN])))
        h = h + mkc.linear(up, layer.param(f"{name}.down.weight", [HIDDEN, width]))
    return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))


@cache
def lowered(ranks: int) -> Lowered:
    return lower(mkc.trace(decoder, name="stored", batch=1, context=64), ranks)


def with_period(program: Program, period: int) -> Program:
    def body(items: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        return tuple(map(changed, items))

    def changed(one: Phase | Loop) -> Phase | Loop:
        if isinstance(one, Loop):
            return replace(one, body=body(one.body))
        return replace(one, period=period) if isinstance(one, StoreBlockPhase) else one

    return replace(program, body=body(program.body))


def test_layers_that_store_are_no_code_of_their_own() -> None:
    stores = [one for one in lowered(1).program.phases() if isinstance(one, StoreBlockPhase)]
    assert len(stores) < LAYERS / 3
    assert len({one.counter for one in stores}) == 1


def test_where_executions_store() -> None:
    first = next(one for one in lowered(1).program.phases() if isinstance(one, StoreBlockPhase))
    assert places(first, 0, 7) == (0, None, None, 1, None, None, 2)
    assert places(first, PERIOD * SLOTS, 4) == (None,) * 4  # all slots are full


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernel_stores_where_the_program_says(ranks: int) -> None:
    one = lowered(ranks)
    assert prove([one.program] * ranks, load_target(TARGET)).ok
    compare(one, range(ranks), launches_of(one.program))


@pytest.mark.parametrize("period", [1, PERIOD - 1, PERIOD + 1])
def test_a_kernel_with_another_period_is_found(period: int) -> None:
    one = lowered(1)
    module = module_of(one)
    other = with_period(one.program, period)
    case = launches_of(other)[0]
    found = tracer_of(other, 0, case).run(trace(module), reference_names(module.SPEC))
    assert "expected writes" in str(difference(expected_events(other, 0, case), found))
