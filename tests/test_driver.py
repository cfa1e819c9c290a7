"""The driver: which topology is taken, what does not fit, and what is planned again."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc.driver
from mkc.codegen_pallas.aot import AotResult
from mkc.driver import CompileRequest
from mkc.driver import choose_topology
from mkc.driver import compile_graph
from mkc.driver import lower_graph
from mkc.driver import missing_vmem
from mkc.errors import AheadOfTimeError
from mkc.errors import BatchError
from mkc.errors import DeviceCountError
from mkc.errors import HbmError
from mkc.errors import UnknownTargetError
from mkc.errors import VmemError
from mkc.ir.graph import Graph
from mkc.report import rank_bytes
from mkc.schedule.program import Program
from mkc.targets import load_target
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.stacks import Stack

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("generation", "topology"),
    [
        ("tpu7x", "tpu7x:1x1x1"),
        ("v5p", "v5p:1x1x1"),
        ("v6e", "v6e:2x2"),  # 50 GiB of weights over devices of 31 GiB
        ("v5e", "v5e:2x2"),  # a quarter of the weights and the whole table: 14.3 of 15.7 GiB
    ],
)
def test_a_generation_alone_takes_the_smallest_topology(generation: str, topology: str) -> None:
    """Of those that hold the 27B model; one device fewer would not do."""
    graph = full_size()
    chosen = choose_topology(graph, generation, None)
    assert chosen.name == topology
    weights, states = rank_bytes(lower_graph(graph, chosen).program)
    assert weights + states <= chosen.hbm.usable_bytes
    for smaller in chosen.topologies:
        if chosen.topology is not None and smaller.devices < chosen.topology.devices:
            with pytest.raises((HbmError, VmemError)):
                lower_graph(graph, load_target(smaller.full_name))


def test_a_named_topology_is_taken_as_it_is() -> None:
    assert choose_topology(full_size(), "v5e:1x1", None).name == "v5e:1x1"
    assert choose_topology(full_size(), "tpu7x:2x2x1", 4).name == "tpu7x:2x2x1"


@pytest.mark.parametrize(("tp", "topology"), [(1, "v5e:1x1"), (3, "v5e:2x2"), (8, "v5e:2x4")])
def test_tp_takes_the_smallest_topology_with_as_many_devices(tp: int, topology: str) -> None:
    assert choose_topology(dense_graph(), "v5e", tp).name == topology


def test_more_ranks_than_any_topology_has() -> None:
    """The largest topology is taken, so that the message can say what it has."""
    target = choose_topology(dense_graph(), "v5e", 512)
    assert target.name == load_target("v5e").topologies[-1].full_name
    with pytest.raises(DeviceCountError, match="tp 512"):
        lower_graph(dense_graph(), target, tp=512)


def test_unknown_generation() -> None:
    with pytest.raises(UnknownTargetError, match="known targets: tpu7x, v5e, v5p, v6e"):
        choose_topology(dense_graph(), "v9", None)


def test_what_no_topology_holds() -> None:
    """The largest one is tried, and the message says by how much it fails."""
    graph = dense_graph(batch=8, context=1 << 24)
    target = choose_topology(graph, "v5e", None)
    assert target.name == load_target("v5e").topologies[-1].full_name
    with pytest.raises(HbmError) as raised:
        lower_graph(graph, target)
    message = str(raised.value)
    assert f"target '{target.name}': each device needs" in message
    assert "GiB too much. No topology of this target holds them" in message


def test_too_few_devices_names_the_topology_that_would_do() -> None:
    with pytest.raises(HbmError) as raised:
        lower_graph(full_size(), load_target("v5e:1x1"))
    message = str(raised.value)
    weights, states = (float(one.split()[-2]) for one in message.split("(")[1].split(" of ")[:2])
    assert 50 < weights < 51
    assert 0 < states < 0.5
    assert message.endswith("GiB too much. Use --target v5e:2x2, with which they fit.")


@pytest.mark.parametrize("batch", [0, 9])
def test_batch(batch: int) -> None:
    graph = replace(dense_graph(), batch=batch)
    with pytest.raises(BatchError, match=f"batch {batch}.*1 to 8"):
        compile_graph(CompileRequest(graph=graph, target="v6e:2x4", aot=False))


def wide() -> Graph:
    """A residual row of 2^20 values."""
    return Stack(pattern="m", hidden=1 << 20, mlp=256, vocab=256, batch=8).graph()


def test_a_graph_that_is_too_wide() -> None:
    """The message lists what is alive at the peak, largest first, with its operations."""
    with pytest.raises(VmemError) as raised:
        lower_graph(wide(), load_target("tpu7x:2x2x1"))
    lines = str(raised.value).splitlines()
    assert "the kernel needs" in lines[0]
    assert "MiB too much" in lines[0]
    assert "Cheapest change: " in lines[0]
    assert lines[1] == "Buffers live at the peak:"
    sizes = [float(line.split()[0]) for line in lines[2:]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == pytest.approx(raised.value.needed_bytes / MIB, abs=0.2)
    assert any("embed" in line for line in lines[2:])


def test_everything_that_compilation_returns() -> None:
    request = CompileRequest(graph=dense_graph(), target="v6e:2x4", logits=True, aot=False)
    result = compile_graph(request)
    assert result.report["ranks"] == 8
    assert result.report["aot"] is None
    assert result.plan["target"] == result.report["target"] == "v6e:2x4"
    assert "def p00" in result.kernel_source
    assert result.program_text.startswith('program "dense" scheme=none ranks=8 ')
    assert "p00" not in result.graph_text


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("Ran out of memory: Exceeded vmem capacity by 1.50M.", 3 * MIB // 2),
        ("Exceeded vmem capacity by 12.0K", 12 << 10),
        ("Exceeded vmem capacity by 2.0G", 2 * GIB),
        ("Exceeded smem capacity by 1.50M", 0),
        ("", 0),
    ],
)
def test_what_the_compiler_says_it_lacks(error: str, missing: int) -> None:
    assert missing_vmem(error) == missing


class Compiler:
    """Stands in for the TPU compiler: accepts once the plan leaves it enough."""

    def __init__(self, lacks: list[float]) -> None:
        self.lacks = lacks
        self.sources: list[str] = []

    def __call__(self, source: str, *, topology: str) -> AotResult:
        self.sources.append(source)
        lack = self.lacks.pop(0) if self.lacks else 0.0
        error = f"Exceeded vmem capacity by {lack:.2f}M" if lack else None
        return AotResult(ok=not lack, error=error, seconds=1.5, jax="0", libtpu="0")


def test_a_kernel_that_spills_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less of the ring: what the compiler lacked is left to it."""
    compiler = Compiler([20.0])
    monkeypatch.setattr(mkc.driver, "compile_ahead", compiler)
    request = CompileRequest(graph=full_size(batch=8), target="tpu7x:2x2x1")
    result = compile_graph(request)
    before = lower_graph(full_size(batch=8), result.target).residency.vmem_bytes
    assert len(compiler.sources) == 2
    assert result.lowered.residency.vmem_bytes <= before - 20 * MIB
    assert result.kernel_source == compiler.sources[1]
    assert result.report["aot"]["ok"]
    assert result.report["aot"]["seconds"] == result.report["timing"]["aot"] == 3.0  # of both


def test_a_kernel_that_spills_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkc.driver, "compile_ahead", Compiler([1.0, 1.0]))
    with pytest.raises(AheadOfTimeError, match="Exceeded vmem capacity by 1.00M"):
        compile_graph(CompileRequest(graph=full_size(), target="tpu7x:2x2x1"))


def test_a_kernel_that_spills_more_than_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = Compiler([1000.0])
    monkeypatch.setattr(mkc.driver, "compile_ahead", compiler)
    with pytest.raises(AheadOfTimeError, match="Exceeded vmem capacity by 1000.00M"):
        compile_graph(CompileRequest(graph=full_size(), target="tpu7x:2x2x1"))
    assert len(compiler.sources) == 1


def test_a_topology_that_padding_exceeds_is_not_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding the model would fit any of them."""
    counted = rank_bytes

    def padded(program: Program) -> tuple[int, int]:
        return (1 << 50 if program.ranks < 8 else counted(program)[0], 0)

    monkeypatch.setattr(mkc.driver, "rank_bytes", padded)
    with pytest.raises(HbmError) as raised:
        lower_graph(dense_graph(), load_target("v5e:1x1"))
    assert "Use --target v5e:2x4, with which they fit." in str(raised.value)
    assert choose_topology(dense_graph(), "v5e", None).name == "v5e:2x4"
