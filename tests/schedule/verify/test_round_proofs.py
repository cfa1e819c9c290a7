"""Proofs of rounds: quick at full size, and what is left out of a loop hides no tap."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from functools import cache

import pytest

from mkc.cli.speculation import scheme_round
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.verify import prove
from mkc.schedule.verify.case import cases_of
from mkc.spec import block_round
from mkc.targets import load_target
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL
from tests.draft_goldens import draft_case
from tests.goldens import golden_case
from tests.mutation.edits import with_phases
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.schedule.verify.round_programs import round_lowered

SECONDS, BYTES = 30.0, 4 << 30  # what a proof of the largest program may take
REPEATED = 12  # times the layers of the golden target
CONTEXT = 64


@pytest.mark.long
@pytest.mark.parametrize(("batch", "rounds"), [(1, 16), (1, 1), (4, 4)])
def test_a_full_size_round_is_proven_quickly(batch: int, rounds: int) -> None:
    """27B parameters and the drafter on eight ranks; processor time."""
    graph = scheme_round(
        "qwen38", "dflash2", None, batch=batch, context=4096, config_path=None
    ).graph
    program = lower(graph, 8, f"lower{{rounds={rounds}}}").program
    start = time.process_time()
    proof = prove([program] * 8, load_target(TARGET))
    assert proof.issues == ()
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES


@pytest.mark.parametrize(("ranks", "batch", "rounds"), [(1, 1, 1), (2, 4, 3)])
def test_rounds_are_proven(ranks: int, batch: int, rounds: int) -> None:
    program = round_lowered(ranks, batch=batch, rounds=rounds).program
    assert prove([program] * ranks, load_target(TARGET)).issues == ()


def test_launches_differ_in_how_many_rows_are_accepted() -> None:
    program = round_lowered(1).program
    kinds = {(one.at(0), one.rows_at(0), one.counts_at(0)) for one in cases_of(program)}
    counts = {count for _, _, (count,) in kinds}
    assert {0, 1, 8} < counts
    firsts = {first % 16 for (first,), _, _ in kinds if first >= 0}
    assert {0, 15} <= firsts, "behind old rows of a block, and without any"


@cache
def deep() -> Program:
    """Many layers, of which the drafter reads one near the end."""
    golden = golden_case("qwen38_mini").meta["config"]
    text = dict(golden["text_config"])
    text["num_hidden_layers"] *= REPEATED
    text["layer_types"] = text["layer_types"] * REPEATED
    config = {**golden, "text_config": text}
    draft = dict(draft_case().meta["config"])
    layers = draft["dflash_config"]["target_layer_ids"]
    late = [*layers[:-1], text["num_hidden_layers"] - 6]
    draft["dflash_config"] = {**draft["dflash_config"], "target_layer_ids": late}
    draft["num_target_layers"] = text["num_hidden_layers"]
    graph = block_round(MODEL, config, DRAFTER, draft, batch=1, context=CONTEXT)
    return lower(graph.graph, 1).program


def codes(program: Program, *, shorten: bool) -> set[str]:
    proof = prove([program], load_target(TARGET), shorten=shorten)
    return {one.code for one in proof.issues}


def test_no_tap_is_left_out_of_a_loop() -> None:
    short = prove([deep()], load_target(TARGET))
    whole = prove([deep()], load_target(TARGET), shorten=False)
    assert short.issues == whole.issues == ()
    assert any(one.left_out > 0 for one in short.periods)
    assert short.events < whole.events


def test_a_tap_that_is_missing_late_is_seen() -> None:
    """With and without leaving out periods: its reader finds nothing there."""
    unread = max(
        place for one in deep().phases() if isinstance(one, TapPhase) for place in one.places
    )
    last = unread - 1

    def unstored(phase: Phase) -> Phase:
        if not isinstance(phase, TapPhase):
            return phase
        return replace(phase, places=tuple(unread if p == last else p for p in phase.places))

    program = with_phases(deep(), unstored)
    assert "V203" in codes(program, shorten=True)
    assert codes(program, shorten=True) == codes(program, shorten=False)
