"""Full-size kernels, compiled by the real TPU compiler: what the project promises of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from json import loads
from pathlib import Path

import pytest

from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.report import operand_bytes
from models.qwen38 import MODEL

CONFIG = Path(__file__).parents[2] / "models" / MODEL.default_config
UNPADDED_BYTES = 6_447_000_000  # weights of one of eight ranks, from the checkpoint's shapes
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    target: str
    batch: int = 1
    context: int = 4096
    rounds: int = 1
    served: bool = False  # with logits and masks of tokens, as a backend runs it

    def __str__(self) -> str:
        served = "-served" if self.served else ""
        return f"{self.target}-b{self.batch}-c{self.context}-r{self.rounds}{served}"


MAIN = Case(target="tpu7x:2x2x1")
BATCHED = Case(target="tpu7x:2x2x1", batch=8)
SERVED = Case(target="tpu7x:2x2x1", batch=8, rounds=64, served=True)
OTHERS = (
    Case(target="tpu7x:2x2x1", context=131_072),
    Case(target="tpu7x:2x2x1", rounds=64),
    Case(target="v6e:2x4"),
)
SLOW = (
    Case(target="tpu7x:2x2x1", batch=8, context=131_072),
    Case(target="v6e:2x4", batch=8, context=131_072),
    Case(target="v5e:2x4"),
    Case(target="v5p"),
    Case(target="v5p", batch=8),
)


@cache
def compiled(case: Case) -> CompileResult:
    graph = MODEL.trace(loads(CONFIG.read_text()), batch=case.batch, context=case.context)
    return compile_graph(
        CompileRequest(
            graph=graph,
            target=case.target,
            rounds_per_launch=case.rounds,
            logits=case.served,
            token_masks=case.served,
        )
    )


@pytest.mark.parametrize("case", [MAIN, BATCHED, SERVED, *OTHERS], ids=str)
def test_the_compiler_makes_one_launch_and_nothing_else(case: Case) -> None:
    aot = compiled(case).report["aot"]
    assert aot["ok"]
    assert aot["custom_calls"] == 1
    assert aot["other_ops"] == []


@pytest.mark.parametrize("case", [MAIN, BATCHED, SERVED], ids=str)
def test_states_and_caches_are_changed_in_place(case: Case) -> None:
    """The returned arrays are the donated ones, all of them."""
    report = compiled(case).report
    updated = [one for one in compiled(case).lowered.program.operands if one.updated]
    assert len(updated) == 4
    assert report["aot"]["aliased_bytes"] >= sum(operand_bytes(one) for one in updated)


@pytest.mark.parametrize("case", [MAIN, BATCHED, SERVED], ids=str)
def test_the_plan_of_the_memory_is_what_the_compiler_finds(case: Case) -> None:
    """All arguments; the compiler's tiles of narrow bf16 arrays are smaller than those of VMEM."""
    report = compiled(case).report
    parts = {one["name"]: one["bytes"] for one in report["hbm"]["parts"]}
    arguments = sum(
        parts[name]
        for name in ("weight tape", "other weights", "recurrent states", "key-value caches")
    )
    assert arguments == pytest.approx(report["aot"]["argument_bytes"], rel=0.001)
    assert report["hbm"]["total_bytes"] <= report["hbm"]["limit_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_every_target_compiles_to_one_launch(case: Case) -> None:
    aot = compiled(case).report["aot"]
    assert aot["custom_calls"] == 1
    assert aot["other_ops"] == []


@pytest.mark.parametrize("case", [MAIN, BATCHED], ids=str)
def test_the_tape_has_almost_no_padding(case: Case) -> None:
    moved = compiled(case).report["bytes"]
    assert moved["tape"] <= UNPADDED_BYTES * 1.005
    assert 0 < moved["padding"] < moved["tape"] * 0.005


@pytest.mark.parametrize("case", [MAIN, BATCHED], ids=str)
def test_the_machine_code_stays_small(case: Case) -> None:
    """Loop bodies are emitted once: 64 layers take little more than four."""
    assert 0 < compiled(case).report["aot"]["bundles"] < 40_000


def test_eight_sequences_fit_in_vmem() -> None:
    assert compiled(BATCHED).report["vmem"]["peak_bytes"] <= 58 * MIB


def test_v5p_takes_the_smallest_topology_that_holds_the_weights() -> None:
    """One v5p device has 95 GiB: the whole model fits; the passes alone tell."""
    graph = MODEL.trace(loads(CONFIG.read_text()), batch=1, context=4096)
    result = compile_graph(CompileRequest(graph=graph, target="v5p", aot=False))
    assert result.report["target"] == "v5p:1x1x1"
    assert result.report["ranks"] == 1
