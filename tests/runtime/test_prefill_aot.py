"""The full-size prefill programs, compiled by the real TPU compiler, over the kernel's operands."""

from __future__ import annotations

from functools import cache
from json import loads
from pathlib import Path

import pytest

from mkc import Graph
from mkc.driver import lower_graph
from mkc.hbm_plan import prefill_workspace
from mkc.hbm_plan import saved_slot_bytes
from mkc.report import rank_bytes
from mkc.runtime.prefill_aot import PrefillAot
from mkc.runtime.prefill_aot import compile_prefill_ahead
from mkc.runtime.prefill_aot import large_copies
from mkc.spec import block_round
from mkc.targets import load_target
from models.dflash2 import DRAFTER
from models.kimi_k3 import MODEL as KIMI
from models.qwen38 import MODEL

MODELS = Path(__file__).parents[2] / "models"
CONFIG = MODELS / MODEL.default_config
TARGET = "tpu7x:2x2x1"
RANKS = 8
MIB = 1 << 20


def graph(batch: int, context: int) -> Graph:
    return MODEL.trace(loads(CONFIG.read_text()), batch=batch, context=context)


@cache
def compiled(rows: int, batch: int, context: int) -> PrefillAot:
    return compile_prefill_ahead(graph(batch, context), target=TARGET, tp=RANKS, rows=rows)


def check(rows: int, batch: int, context: int, workspace_bytes: int) -> None:
    """Nothing is copied that has the size of weights or states."""
    found = compiled(rows, batch, context)
    assert found.ok, found.error
    lowered = lower_graph(graph(batch, context), load_target(TARGET), tp=RANKS)
    weights, states = rank_bytes(lowered.program)
    assert found.argument_bytes >= weights + states
    assert found.aliased_bytes >= states, "a state is not changed in place"
    assert found.temporary_bytes <= workspace_bytes
    computed = prefill_workspace(lowered.steps.sharded.graph, rows)
    assert found.temporary_bytes <= computed, "the plan of the memory counts too little"
    assert found.large_copies == ()


def test_a_block_of_64_rows_needs_a_thousandth_of_the_tape() -> None:
    check(64, batch=1, context=4096, workspace_bytes=16 * MIB)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "batch", "context", "workspace"),
    [(16, 8, 4096, 16), (256, 8, 4096, 64), (1024, 1, 131_072, 128)],
)
def test_every_size(rows: int, batch: int, context: int, workspace: int) -> None:
    check(rows, batch=batch, context=context, workspace_bytes=workspace * MIB)


@pytest.mark.long
@pytest.mark.parametrize(("rows", "batch", "workspace"), [(64, 1, 16), (256, 4, 96)])
def test_with_a_drafter(rows: int, batch: int, workspace: int) -> None:
    """Over the tape of the rounds; what the drafter reads of layers is kept for the block alone."""
    config, draft = (loads((MODELS / one.default_config).read_text()) for one in (MODEL, DRAFTER))
    scheme = block_round(MODEL, config, DRAFTER, draft, batch=batch, context=4096, sampling=False)
    found = compile_prefill_ahead(
        scheme.graph, target=TARGET, tp=RANKS, rows=rows, prompts=scheme.prefill
    )
    assert found.ok, found.error
    lowered = lower_graph(scheme.graph, load_target(TARGET), tp=RANKS)
    held = batch * saved_slot_bytes(lowered, 4096)
    assert found.aliased_bytes >= held, "a state is not changed in place"
    assert found.temporary_bytes <= workspace * MIB
    assert found.large_copies == ()


@pytest.mark.long
@pytest.mark.parametrize("rows", [16])
def test_a_mixture_reads_its_experts_where_they_lie(rows: int) -> None:
    """Five layers of Kimi K3 at full width on 32 devices: of every kind of layer one or two.

    Depth adds executions of scans, not temporary memory: the whole model needs six times as much.
    """
    config = loads((MODELS / KIMI.default_config).read_text())
    config["text_config"]["num_hidden_layers"] = 5
    config["text_config"]["linear_attn_config"] |= {
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
    }
    mixture = KIMI.trace(config, batch=1, context=4096)
    found = compile_prefill_ahead(mixture, target="tpu7x:2x2x4", tp=32, rows=rows)
    assert found.ok, found.error
    assert found.large_copies == ()
    assert found.temporary_bytes <= 8 * MIB
    lowered = lower_graph(mixture, load_target("tpu7x:2x2x4"), tp=32)
    assert found.aliased_bytes >= rank_bytes(lowered.program)[1], "a state is not changed in place"
    assert found.temporary_bytes <= prefill_workspace(lowered.steps.sharded.graph, rows)


def test_what_the_compiler_refuses_is_told() -> None:
    found = compile_prefill_ahead(graph(1, 4096), target="tpu7x:1x1x1", tp=RANKS, rows=16)
    assert not found.ok
    assert found.error is not None
    assert "DeviceCountError" in found.error


def test_copies_are_found_in_the_text_of_a_program() -> None:
    """Copies and transpositions of more than 64 MiB, in fusions too."""
    text = """
      %copy.1 = bf16[12584960,256]{1,0:T(16,128)(2,1)} copy(%tape)
      %copy.2 = f32[64,128]{1,0} copy(%small)
      ROOT %transpose.3 = bf16[31232,5120]{1,0} transpose(%head), dimensions={1,0}
      %fusion.4 = bf16[12584960,256]{1,0} fusion(%tape), kind=kLoop
    """
    assert large_copies(text) == ("bf16[12584960,256]", "bf16[31232,5120]")


def test_an_operand_in_another_layout_is_no_copy() -> None:
    """A fusion that reads a part of it, in a layout that its arithmetic prefers."""
    view = "s8[720896,384]{1,0:T(8,128)(4,1)}"
    aliased = "kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%copy_fusion"
    text = f"""
%copy_fusion (input: s8[720896,384]) -> s8[720896,384] {{
  ROOT %copy.1 = {view} copy(%input)
}}

%fused_computation.7 (param_0: s8[720896,384]) -> s32[1920,384] {{
  %fusion.1 = {view} fusion(%param_0), {aliased}
}}

ENTRY %main (param: s8[720896,384]) -> s8[720896,384] {{
  %part = s32[1920,384] fusion(%param), kind=kLoop, calls=%fused_computation.7
}}
"""
    assert large_copies(text) == ()
    assert large_copies(text.replace("%fused_computation.7 (", "%while_body.7 (")) == (
        "s8[720896,384]",
    )
