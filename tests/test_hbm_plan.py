"""The plan of a device's memory: what is in it, how sizes are known, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from json import loads
from pathlib import Path

import pytest

from mkc.driver import lower_graph
from mkc.errors import HbmPlanError
from mkc.hbm_plan import COMPILED
from mkc.hbm_plan import COMPUTED
from mkc.hbm_plan import HbmPlan
from mkc.hbm_plan import hbm_plan
from mkc.hbm_plan import saved_slot_bytes
from mkc.ir.token_masks import with_token_masks
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Lowered
from mkc.report import rank_bytes
from mkc.runtime.backends.opening import prepare_kernel
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target
from models.qwen38 import MODEL
from tests.goldens import golden_case
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import ROUNDS
from tests.runtime.rounds_backends import lowered_round
from tests.runtime.rounds_backends import scheme_of

CONFIG = Path(__file__).parents[1] / "models" / MODEL.default_config
GIB, MIB = 1 << 30, 1 << 20


@cache
def lowered(target: str, batch: int, context: int) -> Lowered:
    graph = MODEL.trace(loads(CONFIG.read_text()), batch=batch, context=context)
    return lower_graph(with_token_masks(graph), load_target(target), logits=True)


def sizes(plan: HbmPlan) -> dict[str, int]:
    return {one.name: one.bytes for one in plan.parts}


@pytest.mark.parametrize("target", ["tpu7x:2x2x1", "v6e:2x4"])
def test_a_plan_counts_every_operand_once(target: str) -> None:
    """With tile padding, of which this model has next to none."""
    found = lowered(target, 8, 4096)
    plan = hbm_plan(found, load_target(target), prefill_rows=256)
    weights, states = rank_bytes(found.program)
    held = sizes(plan)
    counted = held["weight tape"] + held["other weights"]
    assert weights <= counted < weights * 1.001
    counted = held["recurrent states"] + held["key-value caches"]
    assert states <= counted < states * 1.01
    assert held["logits"] == 8 * 31232 * 4  # of one rank, whole tape blocks
    assert 32 * 1024 <= held["inputs and tokens"] < 64 * 1024  # a bit for each column and row
    assert plan.total_bytes == sum(held.values())
    assert plan.limit_bytes == load_target(target).hbm.usable_bytes
    plan.check()


def test_sizes_that_a_compiler_has_said_replace_computed_ones() -> None:
    found, target = lowered("tpu7x:2x2x1", 8, 4096), load_target("tpu7x:2x2x1")
    computed = hbm_plan(found, target, prefill_rows=256)
    known = hbm_plan(found, target, prefill_rows=256, prefill_bytes=5 * MIB, kernel_bytes=3 * MIB)
    origins = {one.name: one.origin for one in computed.parts}
    assert origins["prefill workspace"] == COMPUTED
    assert "(computed)" in str(computed)
    assert {one.name: one.origin for one in known.parts}["prefill workspace"] == COMPILED
    assert "(computed)" not in str(known)
    assert sizes(known)["prefill workspace"] == 5 * MIB
    assert sizes(known)["kernel workspace"] == 3 * MIB


def test_the_computed_workspace_grows_with_the_rows() -> None:
    found, target = lowered("tpu7x:2x2x1", 8, 4096), load_target("tpu7x:2x2x1")
    small, large = (
        sizes(hbm_plan(found, target, prefill_rows=rows))["prefill workspace"] for rows in (64, 256)
    )
    assert large == 4 * small
    assert 7.5e6 < small < 64 * MIB  # a compiled program of 64 rows needs 7.5 MB, see docs/prefill


def test_a_saved_slot_has_its_share_of_every_state() -> None:
    """All slots together with all positions are all states."""
    found = lower_graph(golden_case("qwen38_lane").graph(batch=8), load_target("tpu7x:1x1x1"))
    _, states = rank_bytes(found.program)
    assert 8 * saved_slot_bytes(found, 128) == states


def test_a_kernel_of_rounds() -> None:
    """Prompts have a graph of their own, with one LM head for the last rows; kept rows are no part
    of a saved slot; each round may emit all of its rows."""
    found, target = lowered_round(LANE, ranks=2, batch=2), load_target("tpu7x:1x1x1")
    scheme = scheme_of(LANE, batch=2)
    shard = Shard(ranks=2).apply(scheme.prefill, DecisionLog(), like=found.steps.sharded)
    plan = sizes(hbm_plan(found, target, prefill_rows=64, prompts=shard.graph))
    own = sizes(hbm_plan(found, target, prefill_rows=64))
    assert plan["prefill workspace"] < own["prefill workspace"]
    assert plan["logits"] == 2 * 8 * 1024 * 4
    assert plan["inputs and tokens"] >= 4 * ROUNDS * 2 * 8
    kept = 3 * 2 * 8 * (640 * 2 + (128 + 384 + 128) * 4)  # layers, sequences, rows, lanes
    _, states = rank_bytes(found.program)
    assert 2 * saved_slot_bytes(found, 128) == states - kept


def test_a_model_that_does_not_fit_is_refused_with_the_parts() -> None:
    """Weights and states alone would fit."""
    found, target = lowered("tpu7x:2x2x1", 8, 4096), load_target("tpu7x:2x2x1")
    plan = hbm_plan(found, target, prefill_rows=256)
    weights_and_states = sum(rank_bytes(found.program))
    small = replace(plan, limit_bytes=int(weights_and_states * 1.005))
    with pytest.raises(HbmPlanError) as raised:
        small.check()
    text = str(raised.value)
    assert "tpu7x:2x2x1" in text
    listed = text[text.index("It would hold:") :].splitlines()[1:]
    assert len(listed) == len([one for one in plan.parts if one.bytes])
    assert "weight tape  (from its shapes)" in listed[0]
    assert "(computed from the graph)" in text


def test_the_plan_is_said_and_checked_before_anything_is_loaded() -> None:
    """What is prepared has no weights yet."""
    graph, target = golden_case("qwen38_lane").graph(batch=2), load_target("tpu7x:1x1x1")
    needed = sum(rank_bytes(lower_graph(with_token_masks(graph), target, tp=1).program))
    small = replace(target, hbm=replace(target.hbm, usable_bytes=needed))
    said: list[str] = []
    with pytest.raises(HbmPlanError):
        prepare_kernel(
            "interpret",
            with_token_masks(graph),
            target=small,
            tp=1,
            rounds_per_launch=1,
            say=said.append,
        )
    (line,) = said
    assert line.startswith("memory of each device of tpu7x:1x1x1: weight tape ")
