"""Generated kernels of speculative rounds as text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from mkc.codegen_pallas.aot import compile_ahead
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.runtime.kernel import load_module
from mkc.schedule.program import MatmulPhase
from mkc.spec import plain_round
from mkc.targets import load_target
from models.qwen38 import MODEL
from tests.draft_goldens import golden_round
from tests.goldens import golden_case
from tests.passes.lowering import TARGET


@cache
def lowered(ranks: int, batch: int, rounds: int) -> Lowered:
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=rounds))
    return pipeline.run(golden_round(batch=batch, sampling=False).graph, load_target(TARGET))


def source_of(*, ranks: int = 1, batch: int = 1, rounds: int = 4) -> str:
    one = lowered(ranks, batch, rounds)
    return kernel_source(one.program, one.steps, target=load_target(TARGET))


def phase_source(source: str, name: str) -> str:
    """The function of the phase whose name holds `name`."""
    (found,) = re.findall(rf"^def p\d+_{name}\(.*?(?=^def )", source, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize(("ranks", "batch", "rounds"), [(1, 1, 1), (2, 1, 4), (8, 1, 4), (1, 2, 4)])
def test_every_kernel_loads(ranks: int, batch: int, rounds: int) -> None:
    module = load_module(source_of(ranks=ranks, batch=batch, rounds=rounds))
    assert (batch, 8) == (module.BATCH, module.ROWS_PER_SEQUENCE)
    assert 8 * batch == module.TOKEN_ROWS
    assert (module.SPEC.rounds, module.SPEC.rows_per_sequence) == (rounds, 8)
    roles = [one.role for one in module.SPEC.operands]
    assert roles[:6] == ["tokens", "positions", "kept", "rounds", "budgets", "stop_ids"]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 2), (2, 1)])
def test_rounds_without_drafts_compile(ranks: int, batch: int, tmp_path: Path) -> None:
    """One row for each sequence: products with a single key, and with a single column."""
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=4))
    config = golden_case("qwen38_lane").meta["config"]
    graph = plain_round(MODEL, config, batch=batch, context=128).graph
    one = pipeline.run(graph, load_target(TARGET))
    kernel = tmp_path / "kernel.py"
    kernel.write_text(kernel_source(one.program, one.steps, target=load_target(TARGET)))
    module = load_module(kernel.read_text())
    assert (batch, 1) == (module.BATCH, module.ROWS_PER_SEQUENCE)
    result = compile_ahead(kernel, topology=TARGET)
    assert result.error is None
    assert (result.custom_calls, result.other_ops) == (1, ())


def test_the_name_says_what_it_is() -> None:
    source = source_of()
    assert 'NAME = "qwen38_dflash2_b1_r4"' in source
    assert source.startswith('"""qwen38, scheme dflash2: a round of 1 sequence on 1 device')


def test_weights_that_are_read_once_meet_two_left_operands() -> None:
    text = phase_source(source_of(), "k_proj_v_proj")
    assert text.count("m.tape.ring[") == 1
    assert text.count("jnp.dot(left, weights") == text.count("jnp.dot(also_1_left, weights") == 1
    phase = next(
        one
        for one in lowered(1, 1, 4).program.phases()
        if isinstance(one, MatmulPhase) and one.also
    )
    for view in (phase.output, phase.also[0].output):
        assert f"m.{view.buffer}[:, " in text


def test_each_cache_waits_for_what_entered_it() -> None:
    """Of the drafter's that are the accepted rows, of the target's all rows."""
    source = source_of()
    assert "support.rows_drain(m.cache_kv, m.s_positions, BATCH, ROWS_PER_SEQUENCE)" in source
    assert (
        "support.rows_drain(m.cache_kv_2, m.s_kept_positions, BATCH, ROWS_PER_SEQUENCE)" in source
    )
    assert source.count("m.s_positions, BATCH, ROWS_PER_SEQUENCE),") == 2, "both begin alike"


def test_base_vectors_of_two_convolutions_are_told_apart() -> None:
    """Both are called base_kernel; a page holds those of all sides and taps."""
    source = source_of()
    rows = set(re.findall(r"(w_base_kernel\S*) = support.vector\(page, slot, (\d+), 256\)", source))
    assert len(rows) == 8, "two convolutions, two sides, two taps"
    assert {name for name, _ in rows} == {
        f"w_base_kernel_{side}_{tap}" for side in range(2) for tap in range(2)
    }


def test_one_round_needs_no_choice_of_loads() -> None:
    """No load depends on whether another round follows."""
    assert "last_rounds" not in source_of(rounds=1)
    assert "last_rounds" in source_of(rounds=4)


@cache
def sampled_source(ranks: int, batch: int) -> str:
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=4))
    one = pipeline.run(golden_round(batch=batch).graph, load_target(TARGET))
    return kernel_source(one.program, one.steps, target=load_target(TARGET))


def test_rounds_that_sample() -> None:
    """They begin with what the launch before carried on, and hand on what they made of it."""
    source = sampled_source(2, 1)
    module = load_module(source)
    assert {one.role for one in module.SPEC.operands} > {"temperature", "forced", "carried"}
    accept = phase_source(source, "sharded_accept")
    for text in ("support.accept_sampled(", "listed=64", "m.exchange_race_send", "m.s_forced"):
        assert text in accept
    walk = phase_source(source, "selector_walk")
    assert "support.sampled_walk(" in walk and "temperature=m.temperature" in walk
    parts = ("begin_sampled_rounds", "end_sampled_round(", "end_block_round", "end_sampled_rounds")
    places = [source.index(f"support.{one}") for one in parts]
    assert places == sorted(places)
    assert "sampled" not in source_of(ranks=2), "greedy rounds need none of this"


@pytest.mark.long
def test_the_compiler_accepts_rounds_that_sample(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text(sampled_source(8, 1))
    result = compile_ahead(kernel, topology="tpu7x:2x2x1")
    assert result.error is None
    assert (result.custom_calls, result.other_ops) == (1, ())
