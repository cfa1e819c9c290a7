"""Sessions to prefill into, and what token-by-token decoding says about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mkc.ir.graph import StateKind
from mkc.runtime.kernel import KernelSession
from mkc.runtime.prefill import Prefill
from mkc.runtime.prefill import PrefillProgram
from tests.goldens import golden_case
from tests.ir.test_reference_goldens import prompt_run
from tests.ir.test_reference_goldens import rms
from tests.ir.test_reference_goldens import worst
from tests.kernel.harness import STATE_RELATIVE_RMS
from tests.kernel.harness import build
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower

type Array = NDArray[Any]


@cache
def session_for(name: str, ranks: int, batch: int) -> KernelSession:
    """A kernel in the interpreter, with its weights; tests share it and reset its states."""
    subject = golden_subject(name)
    return build(subject, lower(subject, ranks=ranks, batch=batch), True)


@cache
def prefill_for(name: str, ranks: int, batch: int) -> Prefill:
    """Its programs are compiled once."""
    session = session_for(name, ranks, batch)
    return Prefill(lowered=session.lowered, mesh=session.mesh)


@cache
def program_for(
    name: str, ranks: int, batch: int, rows: int, lanes: int = 1, all_rows: bool = False
) -> PrefillProgram:
    session = session_for(name, ranks, batch)
    return PrefillProgram(
        lowered=session.lowered, mesh=session.mesh, rows=rows, lanes=lanes, all_rows=all_rows
    )


def empty(session: KernelSession) -> KernelSession:
    """Zero states; cache rows are NaN until they are written, for nobody may read them."""
    session.clear_states()
    for key, state in session.lowered.steps.sharded.full.states.items():
        if state.kind is StateKind.KV_CACHE:
            shape = (state.instances, session.program.batch, *state.type.shape)
            session.set_state(key, np.full(shape, np.nan, np.float32))
    return session


def prompt_of(name: str) -> list[int]:
    found: list[int] = golden_case(name).expected["prompt"].tolist()
    return found


def check_logits(name: str, found: Any, expected: Any) -> None:
    """Within the bf16 tolerance of the golden case."""
    limits = golden_case(name).tolerances
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    assert worst(found, expected) < limits["bf16_logits_abs"]
    assert rms(found, expected) < limits["bf16_logits_rms"]


def check_states(session: KernelSession, slot: int, expected: Any, rows: int) -> None:
    """Every state of one sequence after `rows` tokens; `expected` is [instances, 1, ...] by key."""
    for key, state in session.lowered.steps.sharded.full.states.items():
        found = session.state(key)[:, slot].astype(np.float32)
        wanted = np.asarray(expected[key], np.float32)[:, 0]
        if state.kind is StateKind.KV_CACHE:
            assert np.isnan(found[:, rows:]).all(), f"{key}: rows were written ahead"
            found, wanted = found[:, :rows], wanted[:, :rows]
        assert rms(found, wanted) < STATE_RELATIVE_RMS * wanted.std(), key


def check_after_prompt_tokens(
    name: str, session: KernelSession, slot: int, rows: int, logits: Any
) -> None:
    """Logits and states after `rows` tokens of the golden prompt, against single steps."""
    single = prompt_run(name, "reference")
    check_logits(name, np.asarray(logits)[0], single.logits[rows - 1])
    check_states(session, slot, single.states[rows - 1], rows)


def snapshot(session: KernelSession) -> dict[str, bytes]:
    """The bits of all state operands."""
    return {
        one.name: np.asarray(session.operands[one.name]).tobytes()
        for one in session.program.operands
        if one.updated
    }


def feed(
    prefill: Prefill, session: KernelSession, pieces: Sequence[Sequence[int]], slot: int = 0
) -> Any:
    """Feeds pieces one after the other; logits of the last token."""
    start, logits = 0, None
    for piece in pieces:
        logits = prefill.run(session.operands, piece, slot=slot, start=start).logits
        start += len(piece)
    return logits
