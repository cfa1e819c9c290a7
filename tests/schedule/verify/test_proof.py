"""Sound programs are proven, loops are cut short without losing anything, and large ones are quick.

What is not sound is in `tests/mutation`.
"""

from __future__ import annotations

import resource
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.schedule.program import Program
from mkc.schedule.verify import CODES
from mkc.schedule.verify import OBLIGATIONS
from mkc.schedule.verify import prove
from mkc.schedule.verify import verify_program
from mkc.targets import load_target
from tests.mutation.edits import Mutant
from tests.mutation.mutations import MUTATIONS
from tests.mutation.subjects import subject
from tests.passes.lowering import CASES
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack

SECONDS, BYTES = 30.0, 4 << 30  # what a proof of the largest program may take
ROUNDS = 4
LAYERS = 24


@pytest.mark.parametrize(("name", "ranks"), [one for one in CASES if one[0] != "27b"])
def test_models(name: str, ranks: int) -> None:
    assert verify_program(lowered(name, ranks).program, load_target(TARGET)) == []


@given(
    STACKS,
    strategies.sampled_from([1, 2, 8]),
    strategies.sampled_from(["", "collectives{algorithm=two_phase}", f"lower{{rounds={ROUNDS}}}"]),
    strategies.sampled_from(["", "tile{load_bytes=64KiB}", "tile{ring_bytes=128KiB}"]),
)
@settings(max_examples=6, deadline=None)
def test_random_stacks(stack: Stack, ranks: int, one: str, other: str) -> None:
    """Loops in loops, unequal layers, deep and shallow rings, all kinds of exchanges."""
    program = lower(stack.graph(), ranks, ",".join(filter(None, (one, other)))).program
    assert verify_program(program, load_target(TARGET)) == []


@pytest.mark.long
@pytest.mark.parametrize(("batch", "rounds"), [(1, 1), (1, 16), (8, 1)])
def test_a_full_size_program_is_proven_quickly(batch: int, rounds: int) -> None:
    """27B parameters on eight ranks; processor time, since other work may share the machine."""
    program = lower(full_size(batch=batch), 8, f"lower{{rounds={rounds}}}").program
    start = time.process_time()
    proof = prove([program] * 8, load_target(TARGET))
    assert proof.issues == ()
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES


def codes(mutant: Mutant, *, shorten: bool) -> set[str]:
    proof = prove(mutant.programs, load_target(TARGET), edit=mutant.edit, shorten=shorten)
    return {one.code for one in proof.issues}


@cache
def deep() -> Program:
    """A loop that is long enough to repeat itself."""
    return lower(Stack(pattern="d" * LAYERS, hidden=256, mlp=256, vocab=256).graph(), 2).program


def test_a_long_loop_repeats_itself() -> None:
    """The shortened walk executes the first iterations, a period and the last ones."""
    program = deep()
    short = prove([program] * 2, load_target(TARGET))
    whole = prove([program] * 2, load_target(TARGET), shorten=False)
    assert short.ok
    assert whole.ok
    (period, *_) = short.periods
    assert period.count == LAYERS
    assert period.left_out > 0
    assert whole.periods == ()
    assert short.events < whole.events
    assert short.messages < whole.messages


DEEP_MUTANTS = [
    "tape_wait_dropped",
    "write_back_elsewhere",
    "loop_too_long",
    "receive_wait_dropped",  # the sums of this program have one exchange, so no parity
    "exchange_before_the_barrier",
]


@pytest.mark.parametrize("name", DEEP_MUTANTS)
def test_leaving_out_periods_hides_nothing(name: str) -> None:
    """A spoiled program fails in the same ways when every iteration is executed."""
    mutant = next(one for one in MUTATIONS if one.name == name).make(deep())
    found = codes(mutant, shorten=True)
    assert found
    assert found == codes(mutant, shorten=False)


def test_a_launch_of_many_rounds_costs_no_more() -> None:
    few = lower(dense_graph(), 1, "lower{rounds=8}").program
    many = lower(dense_graph(), 1, "lower{rounds=4096}").program
    proofs = [prove([one], load_target(TARGET)) for one in (few, many)]
    assert all(one.ok for one in proofs)
    assert proofs[1].events == proofs[0].events
    assert any(one.loop == "rounds" and one.left_out > 4000 for one in proofs[1].periods)


def test_a_cyclic_wait_is_told_as_a_path() -> None:
    mutation = next(one for one in MUTATIONS if one.name == "exchanges_in_other_order")
    mutant = mutation.make(subject("two"))
    proof = prove(mutant.programs, load_target(TARGET), edit=mutant.edit)
    (issue,) = [one for one in proof.issues if one.code == "V701"]
    assert "rank 0 waits for a message in p09 for rank 1" in issue.message
    assert "rank 1 waits for a message in p09 for rank 0" in issue.message


def test_an_issue_names_phase_line_and_cause() -> None:
    mutation = next(one for one in MUTATIONS if one.name == "tape_wait_dropped")
    mutant = mutation.make(subject("dense"))
    issue = prove(mutant.programs, load_target(TARGET), edit=mutant.edit).issues[0]
    assert issue.where.startswith("p03 (linear model.layers.{index}.self_attn.q_proj.weight")
    assert "models/examples/dense.py" in issue.where
    assert issue.hint == CODES[issue.code].hint


def test_checks_say_which_obligation_fails() -> None:
    mutation = next(one for one in MUTATIONS if one.name == "exchange_before_the_barrier")
    mutant = mutation.make(subject("two"))
    checks = prove(mutant.programs, load_target(TARGET), edit=mutant.edit).checks()
    assert set(checks) == set(OBLIGATIONS)
    assert [name for name, holds in checks.items() if not holds] == ["ranks"]
