"""The kernel on one device.

Whole prompts and answers run in the interpreter of Pallas itself, where a step takes milliseconds.
The short runs use the TPU interpreter at its most hostile, see `test_ranks.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from models.qwen38 import MODEL
from tests.codegen_pallas.support_run import Mode
from tests.generate_weights import weights
from tests.goldens import CASES
from tests.goldens import CONTEXT
from tests.goldens import golden_case
from tests.kernel.harness import DECODED
from tests.kernel.harness import PROMPT
from tests.kernel.harness import STEPS
from tests.kernel.harness import Subject
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.harness import rms
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.harness import worst

# Tiles far smaller than the context: 111 positions cross six borders of 16, or three of 32.
CACHE_TILES = {"qwen38_mini": 32, "qwen38_lane": 16}
# Before, at and behind borders of tiles of 16 and 32 rows, and where nothing is in the cache yet.
POSITIONS = (0, 15, 16, 17, 31, 47, 48, 63)


def cache_tile(name: str) -> str:
    return f"residency{{cache_tile={CACHE_TILES[name]}}}"


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_prompt_and_greedy_tokens(name: str, batch: int) -> None:
    """48 given and 63 chosen tokens; sequence 0 is the golden one, the others differ from it."""
    subject = golden_subject(name)
    reference = reference_of(subject)
    session = session_of(subject, ranks=1, batch=batch, mode=Mode.GENERIC, passes=cache_tile(name))
    assert session.program.caches[0].tile == CACHE_TILES[name]
    run = run_kernel(session, reference, [0] * batch, STEPS)
    check(run, reference)
    check_golden(name, run.logits[:, 0], run.tokens[:, 0])


def check_golden(name: str, logits: Any, tokens: Any) -> None:
    """[STEPS, vocab] and [STEPS] against the recorded values."""
    case = golden_case(name)
    expected, limits = case.expected, case.tolerances
    prompt, decoded = logits[:PROMPT], logits[PROMPT - 1 :]
    assert worst(prompt, expected["prefill.logits"]) < limits["bf16_logits_abs"]
    assert rms(prompt, expected["prefill.logits"]) < limits["bf16_logits_rms"]
    assert worst(decoded, expected["decode.logits"]) < limits["bf16_logits_abs"]
    assert rms(decoded, expected["decode.logits"]) < limits["bf16_logits_rms"]
    # Both of two logits may be off by the largest measured error, of which the limit is twice.
    clear = expected["decode.margin"] > limits["bf16_logits_abs"]
    assert clear.sum() > 0.9 * DECODED, "the recorded margins are too small to compare tokens"
    chosen = tokens[PROMPT - 1 :]
    assert len(chosen) == DECODED
    assert (chosen == expected["decode.tokens"])[clear].all()


@pytest.mark.parametrize(
    ("name", "mode"), [("qwen38_mini", Mode.GENERIC), ("qwen38_lane", Mode.LATE)]
)
def test_sequences_at_different_positions(name: str, mode: Mode) -> None:
    """One batch whose sequences stand before, at and behind tile borders."""
    subject = golden_subject(name)
    reference = reference_of(subject)
    session = session_of(subject, ranks=1, batch=len(POSITIONS), mode=mode, passes=cache_tile(name))
    check(run_kernel(session, reference, POSITIONS, 2), reference)


def test_the_last_position_of_the_context() -> None:
    """The row that fills a cache of 64 positions."""
    subject = golden_subject("qwen38_lane")
    case = golden_case("qwen38_lane")
    short = Subject(
        name="lane_context_64",
        trace=lambda batch: case.graph(batch=batch, context=64),
        weights=subject.weights,
        prompt=subject.prompt,
        golden=case,
    )
    reference = reference_of(subject)
    clipped = {
        position: {
            key: state[:, :, :64] if ".kv." in key else state for key, state in states.items()
        }
        for position, states in reference.states.items()
    }
    reference = type(reference)(**{**vars(reference), "states": clipped})
    session = build(short, lower(short, ranks=1, batch=1), Mode.LATE.parameters())
    assert session.program.context == 64
    check(run_kernel(session, reference, [63], 1), reference)


def matmuls(program: Program) -> list[MatmulPhase]:
    return [phase for phase in program.phases() if isinstance(phase, MatmulPhase)]


def guards(program: Program) -> int:
    """Refills whose size depends on whether a loop goes on."""
    return sum(
        len(refill) > 1 for one in matmuls(program) for run in one.runs for refill in run.refill
    )


def five_blocks() -> Subject:
    """`qwen38_lane` with matrices of five column blocks, which divide into nothing but ones."""
    case = golden_case("qwen38_lane")
    text = {**case.meta["config"]["text_config"], "vocab_size": 1280, "intermediate_size": 640}
    text |= {"bos_token_id": 0, "eos_token_id": 0}
    config = {**case.meta["config"], "text_config": text}

    def trace(batch: int) -> Any:
        return MODEL.trace(config, batch=batch, context=CONTEXT)

    return Subject(
        name="five_blocks",
        trace=trace,
        weights=weights(trace(1), case.meta["seed"]),
        prompt=case.expected["prompt"] % 1280,
    )


def check_a_few_steps(subject: Subject, passes: str) -> Program:
    """Runs three sequences at different positions for two steps; the program that ran."""
    reference = reference_of(subject)
    session = session_of(subject, ranks=1, batch=3, mode=Mode.LATE, passes=passes)
    check(run_kernel(session, reference, (0, 31, 48), 2), reference)
    return session.program


def test_loads_of_a_part_of_a_block() -> None:
    """Column blocks that take several loads each are summed up over them."""
    program = check_a_few_steps(golden_subject("qwen38_lane"), "tile{load_bytes=64KiB}")
    assert {one.loads_per_step for one in matmuls(program)} == {4, 6}


def test_loads_of_several_blocks_with_guarded_refills() -> None:
    """At the end of a loop body the next load depends on whether the loop goes on."""
    program = check_a_few_steps(golden_subject("qwen38_lane"), "")
    assert {one.blocks_per_step for one in matmuls(program)} >= {2, 4, 6}
    assert guards(program) == 5


def test_a_shorter_last_load() -> None:
    """Five blocks in loads of two: the last load has one."""
    program = check_a_few_steps(five_blocks(), "tile{load_bytes=512KiB}")
    uneven = [one for one in matmuls(program) if one.blocks % one.blocks_per_step]
    assert [(one.blocks, one.blocks_per_step) for one in uneven] == [(5, 2)] * 3


def test_the_shortest_ring() -> None:
    """One load is consumed, one has landed, one is under way."""
    program = check_a_few_steps(golden_subject("qwen38_lane"), "tile{ring_bytes=1}")
    assert program.tape.slots == 3


def test_sequences_do_not_see_each_other() -> None:
    """A sequence gets the same bits whoever is beside it."""
    subject = golden_subject("qwen38_lane")
    reference = reference_of(subject)
    session = session_of(subject, ranks=1, batch=3, mode=Mode.LATE, passes=cache_tile(subject.name))
    one = run_kernel(session, reference, (31, 16, 0), 2)
    other = run_kernel(session, reference, (31, 48, 17), 2)
    assert np.array_equal(one.logits[:, 0], other.logits[:, 0])
    assert not np.array_equal(one.logits[:, 1], other.logits[:, 1])
