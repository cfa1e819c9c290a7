"""A decoder with work beside its exchanges, which needs nothing of them."""

from __future__ import annotations

from functools import cache

import mkc
from mkc.passes.pipeline import Lowered
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AllGatherPhase
from tests.passes.lowering import lower

VOCAB, HIDDEN, INNER, SIDE = 512, 512, 512, 1024
LAYERS = 2
GATHERS = "shard{gather_all=True}"
WHOLE = "fuse{overlap=False}"

type InParts = AllReducePhase | AllGatherPhase


def decoder(step: mkc.Step) -> mkc.Outputs:
    """`side` is not needed in the gather of `inner`, nor `outer` in the sum of `down`."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(LAYERS):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        side = mkc.linear(x, layer.param("side.weight", [SIDE, HIDDEN]))
        inner = mkc.linear(x, layer.param("inner.weight", [INNER, HIDDEN]))
        inner = mkc.rms_norm(inner, layer.param("inner_norm.weight", [INNER]), eps=1e-6)
        down = mkc.linear(mkc.silu(side), layer.param("down.weight", [HIDDEN, SIDE]))
        h = h + mkc.linear(inner, layer.param("outer.weight", [HIDDEN, INNER])) + down
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


@cache
def overlapped_graph(batch: int = 1) -> mkc.Graph:
    return mkc.trace(decoder, name="overlapped", batch=batch, context=64)


@cache
def lower_overlapped(*, ranks: int = 2, batch: int = 1, passes: str = "") -> Lowered:
    """Its program; `passes` are options besides that of gathers."""
    options = ",".join(one for one in (GATHERS, passes) if one)
    return lower(overlapped_graph(batch), ranks, options)


def between(program: Program, start: InParts) -> list[Phase]:
    """The phases between the start of an exchange and its end."""
    (body,) = [one for one in _bodies(program.body) if start in one]
    behind = body[body.index(start) + 1 :]
    found: list[Phase] = []
    for one in behind:
        assert not isinstance(one, Loop)
        if isinstance(one, AllReducePhase | AllGatherPhase):
            assert one.part is Part.FINISH
            return found
        found.append(one)
    raise AssertionError("an exchange without its end")


def starts(program: Program) -> list[InParts]:
    return _parts(program, Part.START)


def ends(program: Program) -> list[InParts]:
    return _parts(program, Part.FINISH)


def _parts(program: Program, part: Part) -> list[InParts]:
    return [
        one
        for one in program.phases()
        if isinstance(one, AllReducePhase | AllGatherPhase) and one.part is part
    ]


def _bodies(body: tuple[Phase | Loop, ...]) -> list[tuple[Phase | Loop, ...]]:
    inner = [found for one in body if isinstance(one, Loop) for found in _bodies(one.body)]
    return [body, *inner]
