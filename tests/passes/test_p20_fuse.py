"""Pass 20: which operations become one phase, and which ones cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkc
from mkc.ir.types import DType
from mkc.passes.p10_shard import Shard
from mkc.passes.p20_fuse import Fuse
from mkc.passes.p20_fuse import loop_name
from mkc.passes.pipeline import Pipeline
from mkc.passes.steps import Alias
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import MatmulPhase
from mkc.targets import load_target
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import lower
from tests.passes.test_p10_shard import shard

HIDDEN = 512


def fuse(function: Callable[[mkc.Step], mkc.Outputs], *, ranks: int = 1) -> StepGraph:
    graph = mkc.trace(function, name="fused", batch=1, context=64)
    return Fuse().apply(shard(graph, ranks), DecisionLog())


def outline(body: tuple[Step | StepLoop, ...]) -> list[str]:
    """A line per step: its kind, and the weights of a projection or the operations of a chain."""
    lines = []
    for item in body:
        if isinstance(item, StepLoop):
            lines += [f"loop {item.count}", *[f"  {line}" for line in outline(item.body)]]
            continue
        if "matmul" in item.kind:
            words = [node.operands[1].split(".")[-2] for node in item.nodes]
        else:
            words = [node.op.mnemonic for node in item.nodes]
        lines.append(f"{item.kind} {' '.join(words)}")
    return lines


def test_steps_of_a_dense_layer() -> None:
    """Three projections of one input become one matmul; splitting heads is no step."""
    steps = Fuse().apply(shard(dense_graph(), 2), DecisionLog())
    assert outline(steps.body) == [
        "vector rotary_table",
        "embed embed",
        "loop 8",
        "  vector rms_norm",
        "  matmul q_proj k_proj v_proj",
        "  vector rotary rotary",
        "  attention attention",
        "  matmul o_proj",
        "  all_reduce all_reduce",
        "  vector binary rms_norm",
        "  matmul gate_proj up_proj",
        "  vector unary binary",
        "  matmul down_proj",
        "  all_reduce all_reduce",
        "  vector binary",
        "vector rms_norm",
        "matmul lm_head",
        "argmax sharded_argmax",
    ]


def test_ids_count_steps_in_program_order() -> None:
    steps = list(Fuse().apply(shard(full_size(), 8), DecisionLog()).steps())
    assert [one.id for one in steps] == [f"p{number:02d}" for number in range(len(steps))]


def test_parts_of_a_fused_projection_are_views_of_it() -> None:
    """q, k and v of one matmul, then their heads, are lanes of one buffer."""
    steps = Fuse().apply(shard(dense_graph(), 2), DecisionLog())
    (fused,) = [one for one in steps.steps() if len(one.nodes) == 3 and one.kind == "matmul"]
    assert steps.widths[fused.output] == 512 + 256 + 256
    starts = [steps.resolve(node.results[0].name) for node in fused.nodes]
    assert starts == [
        Alias(base=fused.output, start=0, width=512),
        Alias(base=fused.output, start=512, width=256),
        Alias(base=fused.output, start=768, width=256),
    ]
    (attention,) = [one for one in steps.steps() if one.kind == "attention"]
    assert steps.resolve(attention.nodes[0].operands[2]) == starts[2]


def two_inputs(step: mkc.Step) -> mkc.Outputs:
    """`a` and `b` read h, `c` reads something else."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, HIDDEN]))
    a = mkc.linear(h, mkc.param("a.weight", [HIDDEN, HIDDEN]))
    c = mkc.linear(mkc.silu(a), mkc.param("c.weight", [HIDDEN, HIDDEN]))
    b = mkc.linear(h, mkc.param("b.weight", [HIDDEN, HIDDEN]))
    return mkc.next_token(c + b, mkc.param("head.weight", [1024, HIDDEN]))


def test_projections_of_one_value_become_one_matmul() -> None:
    """Wherever they stand in the block: `b` moves up to `a`."""
    assert outline(fuse(two_inputs).body) == [
        "embed embed",
        "matmul a b",
        "vector unary",
        "matmul c",
        "vector binary",
        "matmul head",
        "argmax argmax",
    ]


def two_dtypes(step: mkc.Step) -> mkc.Outputs:
    """One projection is rounded, the other one keeps its f32 sums."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, HIDDEN]))
    b = mkc.linear(h, mkc.param("b.weight", [HIDDEN, HIDDEN]), dtype="f32")
    a = mkc.linear(h, mkc.param("a.weight", [HIDDEN, HIDDEN]))
    h = mkc.add(a, b, dtype="bf16")
    return mkc.next_token(h, mkc.param("head.weight", [1024, HIDDEN]))


def test_projections_that_round_differently_are_one_matmul() -> None:
    """Rounded columns come first, whatever their order in the graph."""
    steps = fuse(two_dtypes)
    assert outline(steps.body)[1:3] == ["matmul a b", "vector binary"]
    graph = mkc.trace(two_dtypes, name="dtypes", batch=1, context=64)
    program = lower(graph, 1).program
    phases = {one.title: one for one in program.phases()}
    both = phases["linear a.weight, b.weight"]
    assert isinstance(both, MatmulPhase)
    assert (both.rounded_columns, both.columns) == (HIDDEN, 2 * HIDDEN)
    (buffer,) = (one for one in program.buffers if one.name == both.output.buffer)
    assert buffer.dtype is DType.F32


def gated(wide: int, *narrow: int) -> Callable[[mkc.Step], mkc.Outputs]:
    """A wide projection and projections to a few columns of the same input."""

    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, HIDDEN]))
        x = mkc.linear(h, mkc.param("wide.weight", [wide, HIDDEN]))
        used = mkc.slice(x, 0, 16)
        for index, columns in enumerate(narrow):
            gate = mkc.linear(h, mkc.param(f"narrow{index}.weight", [columns, HIDDEN]))
            used = used * mkc.slice(gate, 0, 16)
        back = mkc.linear(used, mkc.param("back.weight", [HIDDEN, 16]))
        return mkc.next_token(back, mkc.param("head.weight", [1024, HIDDEN]))

    return function


@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        (512, (16, 16), ["matmul wide", "narrow_matmul narrow0 narrow1"]),  # 32 rows, not 256
        (448, (32, 32), ["matmul wide narrow0 narrow1"]),  # they fill up the last block of columns
        (448, (64, 32), ["matmul wide", "narrow_matmul narrow0 narrow1"]),  # they overflow it
        (512, (65,), ["matmul wide narrow0"]),  # wider than the option allows
    ],
)
def test_a_few_columns_are_kept_as_rows(
    wide: int, narrow: tuple[int, ...], expected: list[str]
) -> None:
    """A block of 256 columns for 16 outputs would be read sixteen times too often."""
    steps = fuse(gated(wide, *narrow))
    assert [line for line in outline(steps.body) if "wide" in line or "narrow" in line] == expected


def test_why_a_projection_is_narrow() -> None:
    log = DecisionLog()
    graph = mkc.trace(gated(512, 16, 16), name="gated", batch=1, context=64)
    Fuse().apply(shard(graph, 1), log)
    (decision,) = [one for one in log.decisions if one.id == "fuse.narrow.narrow0.weight"]
    assert decision.chosen == "weights as rows"
    assert decision.because == f"{32 * HIDDEN * 2} bytes as rows, {256 * HIDDEN * 2} as columns"


def test_gates_of_the_full_model_are_narrow() -> None:
    """Six columns each per rank; as columns they would add 4 % of a layer's bytes."""
    steps = Fuse().apply(shard(full_size(), 8), DecisionLog())
    lines = [line.strip() for line in outline(steps.body)]
    assert "narrow_matmul in_proj_b in_proj_a" in lines
    assert "matmul in_proj_qkv in_proj_z" in lines


def test_a_loop_hides_no_name_of_the_kernel() -> None:
    assert loop_name("lax") == "lax_loop"
    assert loop_name("layers_2") == "layers_2"


def test_a_model_of_narrow_projections_only_has_a_tape() -> None:
    def tiny(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("table", [32, 256])
        return mkc.next_token(mkc.embed(step.tokens, table), mkc.param("head", [32, 256]))

    graph = mkc.trace(tiny, name="tiny", batch=1, context=16)
    lowered = Pipeline(shard=Shard(ranks=1)).run(graph, load_target("tpu7x"))
    assert lowered.program.tape.rows == 256
