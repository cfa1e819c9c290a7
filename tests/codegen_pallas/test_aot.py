"""A kernel is compiled by the real TPU compiler in a process of its own, and the result is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkc.codegen_pallas.aot import AotResult
from mkc.codegen_pallas.aot import compile_ahead
from mkc.codegen_pallas.aot import other_operations

KERNEL = Path(__file__).with_name("stream_kernel.py")
TOPOLOGY = "tpu7x:2x2x1"
MEBIBYTE = 1 << 20


def edited(old: str, new: str) -> str:
    """The source of the test kernel with one change."""
    source = KERNEL.read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} is not there exactly once"
    return source.replace(old, new)


@pytest.fixture(scope="module")
def compiled() -> AotResult:
    return compile_ahead(KERNEL, topology=TOPOLOGY)


def test_a_kernel_compiles_to_one_launch_and_nothing_else(compiled: AotResult) -> None:
    assert compiled.error is None
    assert compiled.ok
    assert compiled.custom_calls == 1
    assert compiled.other_ops == ()


def test_machine_code_is_counted(compiled: AotResult) -> None:
    # 16 pushes per 256 x 256 block of weights, 16 blocks in the loop body; one each per bundle
    assert 256 < compiled.bundles < 2_000


def test_time_and_memory_are_reported(compiled: AotResult) -> None:
    assert 0 < compiled.compile_seconds < compiled.seconds
    assert 100 * MEBIBYTE < compiled.peak_bytes < 4_000 * MEBIBYTE


def test_versions_are_reported(compiled: AotResult) -> None:
    assert (compiled.jax, compiled.libtpu) == ("0.12.0.1", "0.0.52")


def test_a_copy_beside_the_launch_is_named() -> None:
    result = compile_ahead(edited("ALIASED = False", "ALIASED = True"), topology=TOPOLOGY)
    assert not result.ok
    assert [one.split()[0] for one in result.other_ops] == ["copy"]
    assert result.error is not None
    assert result.other_ops[0] in result.error


def test_what_the_compiler_refuses_is_told_in_its_words() -> None:
    result = compile_ahead(edited("SLOTS = 4\n", "SLOTS = 40\n"), topology=TOPOLOGY)
    assert not result.ok
    assert result.error is not None
    assert "vmem" in result.error.lower()


def test_too_few_devices_are_told() -> None:
    result = compile_ahead(KERNEL, topology="tpu7x:1x1x1")
    assert not result.ok
    assert result.error is not None
    assert "2 devices, not 8" in result.error


def test_a_process_that_dies_is_told_with_its_last_words() -> None:
    source = "import os\nprint('last words', flush=True)\nos._exit(3)\n"
    result = compile_ahead(source, topology=TOPOLOGY)
    assert not result.ok
    assert result.error is not None
    assert "status 3" in result.error
    assert "last words" in result.error


def test_a_compiler_that_hangs_is_stopped() -> None:
    result = compile_ahead("import time\ntime.sleep(60)\n", topology=TOPOLOGY, timeout_seconds=0.5)
    assert not result.ok
    assert result.error == "the compiler did not finish within 0.5 s"


def test_only_the_entry_computation_counts() -> None:
    hlo = """
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %negate.1 = f32[8]{0} negate(%p)
}

ENTRY %main (a: f32[8]) -> (f32[8]) {
  %a = f32[8]{0} parameter(0)
  %kernel.1 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  %other.1 = f32[8]{0} custom-call(%a), custom_call_target="SomethingElse"
  %fusion.1 = f32[8]{0:T(256)} fusion(%kernel.1), kind=kLoop, calls=%fused
  ROOT %tuple.1 = (f32[8]{0}) tuple(%fusion.1)
}
"""
    assert other_operations(hlo) == ("custom-call other.1", "fusion fusion.1")
