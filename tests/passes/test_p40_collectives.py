"""Pass 40: which all-reduce is done how, and that no message overwrites one that is still read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from re import findall
from re import fullmatch

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

import mkc
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.p40_collectives import ONE_SHOT
from mkc.passes.p40_collectives import TWO_PHASE
from mkc.passes.pipeline import Lowered
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Program
from mkc.targets import load_target
from tests.passes.lowering import CASES
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.machine import unrolled
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack

MET = "met"


def exchanges(program: Program) -> list[tuple[str, str]]:
    """(buffers, algorithm) of every exchange of one step; `met` for those with a barrier."""
    found = []
    for phase in unrolled(program.body):
        if isinstance(phase, AllReducePhase):
            found.append((phase.exchange, MET if phase.meets else phase.algorithm))
        elif isinstance(phase, ArgmaxPhase) and phase.exchange:
            found.append((phase.exchange, "argmax"))
    return found


def assert_no_message_meets_a_reader(program: Program) -> None:
    """A peer may be one exchange ahead, so the next exchange needs other receive buffers.

    Two phases are exempt: each of their buffers is written only after the other one was answered.
    So are exchanges behind which all ranks meet.
    """
    for (first, algorithm), (second, _) in pairwise(exchanges(program)):
        safe = algorithm in (TWO_PHASE, MET)
        assert safe or first != second, f"{first} is used twice in a row"


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_models(name: str, ranks: int) -> None:
    program = lowered(name, ranks).program
    assert bool(exchanges(program)) == (ranks > 1)
    assert MET not in dict(exchanges(program)).values(), "a barrier costs as much as an exchange"
    assert_no_message_meets_a_reader(program)
    planned = {one.name: one.kind for one in program.exchanges}
    assert planned == dict(exchanges(program))


@given(
    STACKS,
    strategies.sampled_from([2, 8]),
    strategies.sampled_from(["auto", ONE_SHOT, TWO_PHASE]),
)
@settings(max_examples=80, deadline=None)
def test_random_stacks(stack: Stack, ranks: int, algorithm: str) -> None:
    """Layers of one or two exchanges, in loops in loops."""
    one = lower(stack.graph(), ranks, f"collectives{{algorithm={algorithm}}}")
    assert_no_message_meets_a_reader(one.program)


def test_a_shared_receive_buffer_is_noticed() -> None:
    program = lowered("dense", 2).program
    same = tuple(
        replace(phase, exchange="same") if isinstance(phase, AllReducePhase) else phase
        for phase in unrolled(program.body)
    )
    with pytest.raises(AssertionError, match="same is used twice in a row"):
        assert_no_message_meets_a_reader(replace(program, body=same))


def decisions(one: Lowered) -> list[tuple[str, float, dict[str, float]]]:
    """(algorithm, predicted us, rejected algorithms with theirs) of every all-reduce."""
    found = []
    for decision in one.log.decisions:
        if decision.id.startswith("collectives.p"):
            match = fullmatch(r"(\w+), predicted ([\d.]+) us", decision.chosen)
            assert match is not None, decision
            others = {
                name: float(findall(r"[\d.]+", why)[0]) for name, why in decision.rejected.items()
            }
            found.append((match[1], float(match[2]), others))
    return found


@pytest.mark.parametrize(
    ("batch", "algorithm"),
    [
        (1, ONE_SHOT),  # 20 KiB to each peer: the second phase would cost more than it saves
        (8, TWO_PHASE),  # 160 KiB to each peer: sending shares saves most of it
    ],
)
def test_the_payload_decides(batch: int, algorithm: str) -> None:
    """Hidden size 5120 over eight ranks, one row or eight; the decision says what each costs."""
    found = decisions(lowered("27b", 8, batch))
    assert len(found) == 4
    for chosen, cost, others in found:
        assert chosen == algorithm
        assert list(others) == [TWO_PHASE if algorithm == ONE_SHOT else ONE_SHOT]
        assert all(cost < other for other in others.values())


def reasons(one: Lowered) -> set[str]:
    """Why every all-reduce is done as it is, behind the size of its message."""
    decided = [each for each in one.log.decisions if each.id.startswith("collectives.p")]
    return {each.because.partition(" ranks")[2] for each in decided}


def test_the_cheaper_algorithm_needs_no_reason_but_its_cost() -> None:
    assert reasons(lowered("27b", 8, 1)) == {""}


def test_an_algorithm_that_was_asked_for_says_so() -> None:
    one = lower(dense_graph(), 2, "collectives{algorithm=two_phase}")
    assert reasons(one) == {"; two_phase was asked for"}
    narrow = lower(Stack(pattern="aaa", hidden=256).graph(), 8, "collectives{algorithm=two_phase}")
    assert reasons(narrow) == {""}, "it does not get what it asked for"


@pytest.mark.parametrize("algorithm", ["auto", ONE_SHOT])
def test_a_dearer_algorithm_says_which_buffer_forbids_the_cheaper_one(algorithm: str) -> None:
    """One exchange per layer and nothing between two of them."""
    options = f"collectives{{algorithm={algorithm}}}"
    one = lower(Stack(pattern="mmm", hidden=1024).graph(), 8, options)
    assert [(chosen, cost > others[ONE_SHOT]) for chosen, cost, others in decisions(one)] == [
        (TWO_PHASE, True)
    ]
    assert reasons(one) == {
        "; one_shot would reuse its receive buffer: the next exchange is this one again"
    }


def test_predicted_costs_are_the_targets() -> None:
    (_, cost, others) = decisions(lowered("27b", 8, 1))[0]
    target = load_target(TARGET)
    one_shot = target.exchange_us(5120 * 4, 7)
    scatter = target.exchange_us(8 * 640 * 4, 7)
    gather = target.exchange_us(8 * 640 * 2, 7)
    assert cost == pytest.approx(one_shot, abs=0.01)
    assert others[TWO_PHASE] == pytest.approx(scatter + gather, abs=0.01)


def test_columns_that_do_not_divide_stay_in_one_piece() -> None:
    """Eight ranks need shares of whole lane tiles: 256 columns have two, not eight."""
    one = lower(Stack(pattern="aaa", hidden=256).graph(), 8, "collectives{algorithm=two_phase}")
    algorithms = {algorithm for _, algorithm in exchanges(one.program)}
    assert algorithms == {ONE_SHOT, "argmax"}
    rejected = [one for one in one.log.decisions if one.id.startswith("collectives.")]
    assert all("lane tiles" in why for one in rejected for why in one.rejected.values())


def test_one_device_exchanges_nothing() -> None:
    one = lowered("dense", 1)
    assert one.program.exchanges == ()
    assert not any(
        node.op.mnemonic == "all_reduce" for node in one.steps.sharded.graph.body.nodes()
    )


def test_rows_of_a_message() -> None:
    """One sequence sends one row; more of them send the whole padded tile."""
    one_row = {one.rows for one in lowered("dense", 2, 1).program.exchanges if one.kind == ONE_SHOT}
    rows = {one.rows for one in lowered("dense", 2, 3).program.exchanges if one.kind != "argmax"}
    assert (one_row, rows) == ({1}, {8})


@pytest.mark.parametrize(("hidden", "algorithm"), [(1024, TWO_PHASE), (256, MET)])
def test_one_exchange_per_layer(hidden: int, algorithm: str) -> None:
    """Nothing stands between two iterations: two phases, or a barrier behind each exchange."""
    one = lower(Stack(pattern="mmm", hidden=hidden).graph(), 8)
    assert {algorithm for _, algorithm in exchanges(one.program)} == {algorithm, "argmax"}
    source = kernel_source(one.program, one.steps, target=load_target(TARGET))
    assert source.count("support.entry_barrier") == (2 if algorithm == MET else 1)


def test_layers_of_one_and_of_two_exchanges() -> None:
    """The exchange before a loop must not share buffers with the first one in it."""
    one = lower(Stack(pattern="daa" * 2 + "m", hidden=256).graph(), 2)
    assert_no_message_meets_a_reader(one.program)
    assert len({name for name, _ in exchanges(one.program)}) <= 4


def two_projections(step: mkc.Step) -> mkc.Outputs:
    """Two row-parallel projections of one value: neither sum needs the other."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, 256]))
    x = mkc.linear(h, mkc.param("up.weight", [mkc.axis(512), 256]))
    a = mkc.linear(x, mkc.param("a.weight", [256, mkc.axis(512)]))
    b = mkc.linear(x, mkc.param("b.weight", [256, mkc.axis(512)]))
    return mkc.next_token(a + mkc.silu(b), mkc.param("head.weight", [1024, 256]))


def test_sums_of_one_value_travel_together() -> None:
    one = lower(mkc.trace(two_projections, name="two", batch=1, context=64), 2)
    phases = [phase for phase in one.program.phases() if isinstance(phase, AllReducePhase)]
    assert [(phase.partial.start, phase.partial.width) for phase in phases] == [
        (0, 512),
    ]
    assert_no_message_meets_a_reader(one.program)
