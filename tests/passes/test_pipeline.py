"""The pipeline as text, the decisions it records, and that it always decides alike."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from json import dumps
from json import loads
from pathlib import Path

import pytest

from mkc.codegen_pallas.source import kernel_source
from mkc.errors import PassSpecError
from mkc.errors import VmemError
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Pipeline
from mkc.report import plan_document
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program_text import print_program
from mkc.targets import Target
from mkc.targets import load_target
from tests.passes.lowering import CASES
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.lowering import report

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def test_text_parses_back() -> None:
    """What `plan.json` holds as `pipeline` gives the same pipeline again."""
    pipeline = Pipeline(shard=Shard(ranks=8)).override("tile{load_bytes=1MiB},lower{logits=True}")
    text = str(pipeline)
    assert text.startswith(
        "shard{ranks=8,gather_all=False},fuse{narrow_columns=64,overlap=True},"
        "tile{load_bytes=1048576,"
    )
    assert Pipeline(shard=Shard(ranks=1)).override(text) == pipeline


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", {}),
        ("tile", {}),
        ("tile{}", {}),
        ("tile{load_bytes=2MiB}", {"tile.load_bytes": 2 * MIB}),
        (
            "tile{load_bytes=512KiB,ring_bytes=100}",
            {"tile.load_bytes": 512 << 10, "tile.ring_bytes": 100},
        ),
        (
            " tile{ load_bytes=1 } , residency{cache_tile=64}",
            {"tile.load_bytes": 1, "residency.cache_tile": 64},
        ),
        ("collectives{algorithm=two_phase}", {"collectives.algorithm": "two_phase"}),
        ("tile{load_bytes=1},tile{load_bytes=3}", {"tile.load_bytes": 3}),
        ("lower{logits=True}", {"lower.logits": True}),
    ],
)
def test_options(text: str, changed: dict[str, object]) -> None:
    """Only what is named changes; the last word counts."""
    before = Pipeline(shard=Shard(ranks=2))
    after = before.override(text)
    for name in ("shard", "fuse", "tile", "collectives", "residency", "prefetch", "lower"):
        old, new = vars(getattr(before, name)), vars(getattr(after, name))
        for option in old:
            assert new[option] == changed.get(f"{name}.{option}", old[option])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tiles", "no pass 'tiles'. Known: collectives, fuse, lower, "),
        ("tile{size=1}", "pass 'tile' has no option 'size'. Known: load_bytes, ring_bytes, "),
        ("prefetch{depth=1}", "pass 'prefetch' has no option 'depth'"),
        ("tile{load_bytes=2MB}", "'2MB' is not a number"),
        ("tile{load_bytes}", "'' is not a number"),
        ("tile{load_bytes=-1}", "'-1' is not a number"),
        ("lower{logits=1}", "'1' is neither True nor False"),
        ("tile{load_bytes=1", "cannot read 'tile{load_bytes=1'"),
        ("tile;fuse", "cannot read 'tile;fuse'"),
        ("tile,,fuse", "cannot read ',fuse'"),
    ],
)
def test_text_that_is_no_pipeline(text: str, problem: str) -> None:
    with pytest.raises(PassSpecError) as raised:
        Pipeline(shard=Shard(ranks=1)).override(text)
    assert problem in str(raised.value)
    assert f"pass pipeline '{text}'" in str(raised.value)


def test_a_decision_is_recorded_once() -> None:
    """A loop over equal steps decides once; the first record counts."""
    log = DecisionLog()
    for chosen in (1, 2):
        log.choose("tile.size", passed="tile", chosen=chosen, because="it fits")
    (decision,) = log.decisions
    assert (decision.chosen, decision.rejected) == ("1", {})


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_decisions_have_names_and_reasons(name: str, ranks: int) -> None:
    decisions = lowered(name, ranks).log.decisions
    assert max(Counter(one.id for one in decisions).values()) == 1
    passes = {one.passed for one in decisions}
    assert {"shard", "tile", "residency", "prefetch"} <= passes
    for one in decisions:
        assert one.id.startswith(f"{one.passed}."), one
        assert one.chosen and one.because, one
        assert all(one.rejected.values()), one
        assert one.chosen not in one.rejected, one


def documents(name: str, ranks: int) -> list[str]:
    """Everything that is written to files: plan, report, program, kernel."""
    graphs = {"dense": dense_graph, "27b": full_size}
    graph = graphs[name]() if name in graphs else golden_graph(name)
    one = lower(graph, ranks)
    target = load_target(TARGET)
    return [
        dumps(plan_document(one, target, cycles={})),
        dumps(report(one)),
        print_program(one.program),
        kernel_source(one.program, one.steps, target=target),
    ]


@pytest.mark.parametrize(("name", "ranks"), [("27b", 8), ("qwen38_mini", 2), ("dense", 1)])
def test_documents_are_the_same_every_time(name: str, ranks: int) -> None:
    """In this process again, and in one that hashes strings in another order."""
    first = documents(name, ranks)
    assert documents(name, ranks) == first
    program = (
        "from tests.passes.test_pipeline import documents\n"
        f"import sys; sys.stdout.write('\\0'.join(documents({name!r}, {ranks})))"
    )
    for seed in ("1", "77"):
        output = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            check=True,
        ).stdout.decode()
        assert output.split("\0") == first


def test_plan_document() -> None:
    """Plain JSON that says of every record what it is; nothing of Python shows."""
    plan = loads(documents("27b", 8)[0])
    assert list(plan) == [
        "version", "target", "pipeline", "program", "sharding", "allocations", "decisions",
        "cycles", "digest",
    ]  # fmt: skip
    assert plan["version"] == 8
    assert plan["program"]["record"] == "Program"
    loops = [one for one in plan["program"]["body"] if one["record"] == "Loop"]
    assert [one["count"] for one in loops] == [16]
    kinds = {one["record"] for one in loops[0]["body"]}
    assert {"Loop", "MatmulPhase", "AttentionPhase", "AllReducePhase", "VectorPhase"} <= kinds
    nodes = [
        node for one in loops[0]["body"] if one["record"] == "VectorPhase" for node in one["nodes"]
    ]
    assert {"rms_norm", "rotary"} <= {node["op"]["op"] for node in nodes}
    assert "object at" not in dumps(plan)


def test_plan_and_report_agree_on_decisions() -> None:
    plan, report, *_ = documents("dense", 1)
    assert len(loads(plan)["decisions"]) == loads(report)["decisions"] > 5


def test_depth_costs_nothing() -> None:
    """Ten times as many layers: the same phases, a loop count and longer operand lists differ."""
    short, deep = (
        print_program(lower(full_size(layers=layers), 8).program).splitlines()
        for layers in (64, 640)
    )
    assert len(short) == len(deep)


def small_memory(mib: int) -> Target:
    target = load_target(TARGET)
    return replace(target, vmem=replace(target.vmem, usable_bytes=mib << 20))


def test_loads_become_smaller_where_they_would_not_fit() -> None:
    """A ring has at least a few slots; what else is live leaves no room for the usual ones."""
    pipeline = Pipeline(shard=Shard(ranks=8))
    usual = pipeline.run(full_size(), small_memory(20))
    smaller = pipeline.run(full_size(), small_memory(16))
    assert smaller.residency.vmem_bytes < 16 << 20 < usual.residency.vmem_bytes + (3 << 20)
    assert smaller.tiles.slot_rows < usual.tiles.slot_rows
    (found,) = [one for one in smaller.log.decisions if one.id == "tile.load_bytes"]
    assert "leave too little VMEM" in found.because
    assert len({one.id for one in smaller.log.decisions}) == len(smaller.log.decisions)


def test_loads_that_were_asked_for_stay_as_they_are() -> None:
    pipeline = Pipeline(shard=Shard(ranks=8)).override("tile{load_bytes=2MiB}")
    with pytest.raises(VmemError):
        pipeline.run(full_size(), small_memory(16))


def test_what_does_not_fit_with_the_smallest_loads_either() -> None:
    with pytest.raises(VmemError) as raised:
        Pipeline(shard=Shard(ranks=8)).run(full_size(), small_memory(12))
    assert raised.value.needed_bytes < 14 << 20, "of the smallest loads, not of the usual ones"
