"""Kernels of graphs whose shape the compiler has to work for: exchanges that repeat with nothing in
between, values that loops carry and others still read, partial sums side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import mkc
from mkc.schedule.program import AllReducePhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN, WIDE = 512, 256, 512
STEPS_WITH_A_MARGIN = 5  # among so many tokens one is clear of rounding noise

type Decoder = Callable[[mkc.Step], mkc.Outputs]


def embedded(step: mkc.Step) -> mkc.Tensor:
    return mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))


def head(h: mkc.Tensor) -> mkc.Outputs:
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


def mlp(x: mkc.Tensor, layer: mkc.Layer, name: str = "mlp") -> mkc.Tensor:
    up = layer.param(f"{name}.up.weight", [mkc.axis(WIDE), HIDDEN])
    down = layer.param(f"{name}.down.weight", [HIDDEN, mkc.axis(WIDE)])
    return mkc.linear(mkc.silu(mkc.linear(x, up)), down)


def one_exchange(step: mkc.Step) -> mkc.Outputs:
    """One exchange per layer: the next one is the same one again."""
    h = embedded(step)
    for layer in mkc.layers(3):
        h = h + mlp(h, layer)
    return head(h)


def one_and_two_exchanges(step: mkc.Step) -> mkc.Outputs:
    """A layer with one exchange, then a loop over layers with two."""
    h = embedded(step)
    for layer in mkc.layers(3):
        h = h + mlp(h, layer)
        if layer.index > 0:
            h = h + mlp(h, layer, "second")
    return head(h)


def change_of_places(step: mkc.Step) -> mkc.Outputs:
    """Two values change places in every layer, and what entered the loop is read behind it."""
    first = embedded(step)
    a, b = first, mkc.silu(first)
    for layer in mkc.layers(3):
        a, b = b + mlp(a, layer), a
    return head(a + b + first)


def side_by_side(step: mkc.Step) -> mkc.Outputs:
    """Projections of one divided value: two sums lie side by side, a third one stays in f32."""
    h = embedded(step)
    for layer in mkc.layers(2):
        x = mkc.linear(h, layer.param("up.weight", [mkc.axis(WIDE), HIDDEN]))
        a = mkc.linear(x, layer.param("a.weight", [HIDDEN, mkc.axis(WIDE)]))
        b = mkc.linear(x, layer.param("b.weight", [HIDDEN, mkc.axis(WIDE)]))
        c = mkc.linear(x, layer.param("c.weight", [HIDDEN, mkc.axis(WIDE)]), dtype="f32")
        h = h + mkc.add(mkc.silu(a) * b, c, dtype="bf16")
    return head(h)


def no_residual(step: mkc.Step) -> mkc.Outputs:
    """A projection replaces its own input."""
    h = embedded(step)
    for layer in mkc.layers(3):
        h = mkc.linear(mlp(h, layer), layer.param("last.weight", [HIDDEN, HIDDEN]))
        h = mlp(h, layer, "again")
    return head(h)


def norm_of_a_projection(step: mkc.Step) -> mkc.Outputs:
    """A norm over the outputs of a projection: no rank can do with a part of them."""
    h = embedded(step)
    for layer in mkc.layers(2):
        x = mkc.linear(h, layer.param("in.weight", [WIDE, HIDDEN]))
        x = mkc.rms_norm(x, layer.param("norm.weight", [WIDE]), eps=1e-6)
        h = h + mkc.linear(x, layer.param("out.weight", [HIDDEN, WIDE]))
    return head(h)


GRAPHS = [
    norm_of_a_projection,
    one_exchange,
    one_and_two_exchanges,
    change_of_places,
    side_by_side,
    no_residual,
]


@pytest.mark.parametrize(
    ("decoder", "ranks"),
    [*((one, ranks) for one in GRAPHS for ranks in (1, 2)), (one_exchange, 8)],
)
def test_kernel(decoder: Decoder, ranks: int) -> None:
    """Late copies, NaN memory and the race detector on every mesh."""
    subject = subject_of(decoder, decoder.__name__, VOCAB)
    reference = reference_of(subject)
    session = session_of(subject, ranks=ranks, batch=1, mode=Mode.LATE)
    check(run_kernel(session, reference, [0], STEPS_WITH_A_MARGIN), reference)


def without_barrier(source: str) -> str:
    """The ranks meet on entry only."""
    barrier = "    support.entry_barrier(RANKS)\n    return c"
    assert source.count(barrier) == 1
    return source.replace(barrier, "    return c")


def test_an_exchange_that_repeats_needs_a_barrier() -> None:
    """256 columns do not divide into shares of four ranks; without the barrier messages collide."""
    subject = subject_of(one_exchange, "one_exchange", VOCAB)
    lowered = lower(subject, ranks=4, batch=1)
    phases = lowered.program.phases()
    assert [one.meets for one in phases if isinstance(one, AllReducePhase)] == [True]
    noted = replace(Mode.LATE.parameters(), on_race="warn")
    session = build(subject, lowered, noted, without_barrier)
    assert run_kernel(session, reference_of(subject), [0], 2).races
