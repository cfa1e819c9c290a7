"""The verifier: a correct graph has no findings; every edit that breaks it is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import mkc
import models
from mkc.errors import GraphError
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.ops import Cast
from mkc.ir.ops import Linear
from mkc.ir.ops import Op
from mkc.ir.types import DType
from mkc.ir.types import heads
from mkc.ir.types import tensor
from mkc.ir.verify import Finding
from mkc.ir.verify import findings
from mkc.ir.verify import verify
from models.examples.dense import decoder
from models.qwen38 import MODEL
from tests.ir.small_graph import HIDDEN
from tests.ir.small_graph import ROWS
from tests.ir.small_graph import H
from tests.ir.small_graph import small_graph


def edit(graph: Graph, result: str, change: Callable[[Node], Node]) -> Graph:
    """`graph` with `change` applied to the node that defines `result`."""

    def walk(block: Block) -> Block:
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                items.append(replace(item, body=walk(item.body)))
            else:
                found = any(value.name == result for value in item.results)
                items.append(change(item) if found else item)
        return Block(items=tuple(items))

    return replace(graph, body=walk(graph.body))


def edit_region(graph: Graph, name: str, change: Callable[[Repeat], Repeat]) -> Graph:
    """`graph` with `change` applied to a region."""

    def walk(block: Block) -> Block:
        items: list[Node | Repeat] = []
        for item in block.items:
            if isinstance(item, Repeat):
                inner = replace(item, body=walk(item.body))
                items.append(change(inner) if item.name == name else inner)
            else:
                items.append(item)
        return Block(items=tuple(items))

    return replace(graph, body=walk(graph.body))


def with_param(graph: Graph, name: str, /, **changes: object) -> Graph:
    return replace(graph, params={**graph.params, name: replace(graph.params[name], **changes)})


def with_state(graph: Graph, name: str, /, **changes: object) -> Graph:
    return replace(graph, states={**graph.states, name: replace(graph.states[name], **changes)})


def first(graph: Graph) -> Finding:
    """The first finding, which `verify` raises for."""
    found = findings(graph)
    assert found, "the edit was not found"
    with pytest.raises(GraphError) as raised:
        verify(graph)
    assert found[0].problem in raised.value.message
    return found[0]


def test_a_correct_graph_has_no_findings() -> None:
    assert findings(small_graph()) == []
    verify(small_graph())


# Scope.


def test_operand_that_nobody_defines() -> None:
    graph = edit(small_graph(), "mixed", lambda node: replace(node, operands=("lost", "conv")))
    found = first(graph)
    assert (found.rule, found.op) == ("scope", "causal_conv %mixed")
    assert found.location == Location(file="small.py", line=5)
    assert "%lost is not defined before its use" in found.problem


def test_operand_defined_later() -> None:
    graph = edit(small_graph(), "mixed", lambda node: replace(node, operands=("h.added", "conv")))
    assert "%h.added is not defined before its use" in first(graph).problem


def test_value_of_a_region_used_outside_it() -> None:
    graph = edit(small_graph(), "logits", lambda node: replace(node, operands=("merged", "table")))
    found = first(graph)
    assert found.rule == "scope"
    assert "%merged is a value inside region 'blocks'" in found.problem
    assert "Carry the value out" in found.hint


def test_value_of_an_inner_region_used_in_the_outer_one() -> None:
    graph = edit(
        small_graph(), "h.attended", lambda node: replace(node, operands=("normed", "h.convolved"))
    )
    assert "inside region 'convolutions'" in first(graph).problem


def test_a_region_may_read_values_around_it() -> None:
    graph = edit(small_graph(), "h.added", lambda node: replace(node, operands=("h", "mixed")))
    assert findings(graph) == []


def test_output_inside_a_region() -> None:
    found = first(replace(small_graph(), outputs={"next_token": "merged"}))
    assert (found.rule, found.op) == ("scope", "output 'next_token'")


def test_output_that_nobody_defines() -> None:
    found = first(replace(small_graph(), outputs={"next_token": "nothing"}))
    assert "%nothing is not defined" in found.problem


def test_no_outputs() -> None:
    assert first(replace(small_graph(), outputs={})).rule == "outputs"


# Names.


def test_result_with_the_name_of_another_value() -> None:
    graph = edit(small_graph(), "next", lambda node: replace(node, results=(_i32("logits"),)))
    found = findings(graph)[0]
    assert (found.rule, found.op) == ("unique names", "argmax %logits")
    assert "%logits is already taken" in found.problem


def test_name_inside_a_region_taken_again_outside() -> None:
    graph = edit(small_graph(), "next", lambda node: replace(node, results=(_i32("normed"),)))
    assert "%normed is already taken" in findings(graph)[0].problem


def test_result_with_the_key_of_a_parameter() -> None:
    graph = edit(small_graph(), "next", lambda node: replace(node, results=(_i32("norm"),)))
    assert findings(graph)[0].rule == "unique names"


def test_two_regions_of_one_name() -> None:
    graph = edit_region(
        small_graph(), "convolutions", lambda region: replace(region, name="blocks")
    )
    found = first(graph)
    assert (found.rule, found.op) == ("unique names", "repeat 'blocks'")
    assert found.location == Location(file="small.py", line=3)


def test_parameter_and_state_with_one_key() -> None:
    graph = small_graph()
    clash = replace(graph.states["keys"], key="norm")
    found = first(replace(graph, states={**graph.states, "norm": clash}))
    assert "a parameter has the same key" in found.problem


def test_parameter_stored_under_another_key() -> None:
    assert "calls itself 'other'" in first(with_param(small_graph(), "norm", key="other")).problem


def _i32(name: str) -> Value:
    return Value(name=name, type=tensor(DType.I32, ROWS))


# Types.


def test_result_type_that_does_not_follow_from_the_operands() -> None:
    wide = (Value(name="normed", type=tensor(DType.F32, ROWS, HIDDEN)),)
    found = first(edit(small_graph(), "normed", lambda node: replace(node, results=wide)))
    assert (found.rule, found.op) == ("types", "rms_norm %normed")
    assert "f32[2, 16]" in found.problem
    assert found.expected == "bf16[2, 16]"


def test_result_of_the_right_size_that_divides_differently() -> None:
    flat = (Value(name="merged", type=tensor(DType.BF16, ROWS, heads(1, HIDDEN))),)
    found = first(edit(small_graph(), "merged", lambda node: replace(node, results=flat)))
    assert (found.rule, found.op) == ("types", "merge_heads %merged")


def test_missing_result() -> None:
    graph = edit(small_graph(), "q.flat", lambda node: replace(node, results=node.results[:2]))
    assert any(found.op == "split_parts %q.flat" for found in findings(graph))


def test_operands_that_do_not_fit() -> None:
    graph = with_param(small_graph(), "out", type=tensor(DType.BF16, HIDDEN, 24))
    found = first(graph)
    assert (found.rule, found.op) == ("types", "linear %attention.out")
    assert found.location == Location(file="small.py", line=12)
    assert "[16, 24]" in found.problem and "16" in found.expected


def test_too_few_operands() -> None:
    graph = edit(small_graph(), "normed", lambda node: replace(node, operands=("h.conv",)))
    assert any(found.op == "rms_norm %normed" for found in findings(graph))


def test_op_that_is_not_registered() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unknown(Op):
        mnemonic: ClassVar[str] = "unknown"

    graph = edit(small_graph(), "next", lambda node: replace(node, op=Unknown()))
    assert first(graph).problem == "the op is not registered"


# Regions.


def test_carry_that_changes_its_type() -> None:
    wide = (Value(name="h.attended", type=tensor(DType.F32, ROWS, HIDDEN)),)
    graph = edit(
        small_graph(),
        "h.attended",
        lambda node: replace(
            node, op=Cast(dtype=DType.F32), operands=("attention.out",), results=wide
        ),
    )
    found = first(graph)
    assert (found.rule, found.op) == ("carries", "repeat 'blocks'")
    assert found.location == Location(file="small.py", line=2)
    assert "%h.attended is f32[2, 16]" in found.problem
    assert found.expected == "bf16[2, 16]"


def test_carry_that_starts_with_another_type() -> None:
    def start(region: Repeat) -> Repeat:
        return replace(region, carries=(replace(region.carries[0], initial="positions"),))

    found = first(edit_region(small_graph(), "blocks", start))
    assert found.rule == "carries"
    assert "%positions is i32[2]" in found.problem


def test_carry_whose_result_has_another_type() -> None:
    def change(region: Repeat) -> Repeat:
        wide = Value(name="h.last", type=tensor(DType.F32, ROWS, HIDDEN))
        return replace(region, carries=(replace(region.carries[0], result=wide),))

    assert first(edit_region(small_graph(), "blocks", change)).rule == "carries"


def test_carry_of_a_value_that_the_body_does_not_define() -> None:
    def change(region: Repeat) -> Repeat:
        return replace(region, carries=(replace(region.carries[0], yielded="gone"),))

    found = first(edit_region(small_graph(), "convolutions", change))
    assert (found.rule, found.op) == ("scope", "repeat 'convolutions'")


def test_region_that_never_runs() -> None:
    graph = edit_region(small_graph(), "blocks", lambda region: replace(region, count=0))
    assert findings(graph)[0].rule == "count"


# Parameters and states.


def test_parameter_with_too_few_instances() -> None:
    found = first(with_param(small_graph(), "norm", indices=(0, 1, 3)))
    assert (found.rule, found.op) == ("instances", "rms_norm %normed")
    assert "@norm has 3 instances, the op runs 4 times inside region 'blocks/convolutions'" in (
        found.problem
    )


def test_state_with_too_many_instances() -> None:
    found = first(with_state(small_graph(), "history", indices=(0, 1, 2, 3, 4)))
    assert (found.rule, found.op) == ("instances", "causal_conv %mixed")


def test_region_count_that_does_not_fit_the_parameters() -> None:
    graph = edit_region(small_graph(), "blocks", lambda region: replace(region, count=3))
    assert "the op runs 6 times" in first(graph).problem


def test_numbered_parameter_without_layers() -> None:
    graph = with_param(small_graph(), "table", pattern="model.{index}.weight")
    assert "has a layer number" in first(graph).problem


def test_one_tensor_for_several_layers() -> None:
    graph = with_param(small_graph(), "norm", pattern="model.norm.weight")
    assert "4 layers read the one tensor 'model.norm.weight'" in first(graph).problem


def test_layer_that_occurs_twice() -> None:
    assert (
        "layers 3 occur twice"
        in first(with_param(small_graph(), "norm", indices=(0, 1, 3, 3))).problem
    )


def test_unused_parameter() -> None:
    graph = small_graph()
    spare = Param(key="spare", pattern="spare.weight", type=tensor(DType.BF16, 4))
    found = first(replace(graph, params={**graph.params, "spare": spare}))
    assert found.op == "parameter @spare"
    assert "no op reads it ('spare.weight')" in found.problem


def test_unused_state() -> None:
    graph = small_graph()
    spare = State(
        key="spare", pattern="spare", kind=StateKind.CONV, type=tensor(DType.BF16, 3, HIDDEN)
    )
    assert first(replace(graph, states={**graph.states, "spare": spare})).op == "state @spare"


def test_state_used_by_two_ops() -> None:
    graph = edit(small_graph(), "attended", lambda node: replace(node, states=("keys", "keys")))
    found = findings(graph)[0]
    assert (found.rule, found.op) == ("states", "attention %attended")
    assert "@keys is used by another op too" in found.problem


def test_state_of_the_wrong_kind() -> None:
    found = first(with_state(small_graph(), "history", kind=StateKind.RECURRENT))
    assert (found.rule, found.op) == ("states", "causal_conv %mixed")
    assert "recurrent" in found.problem and found.expected == "conv"


def test_op_without_its_state() -> None:
    graph = edit(small_graph(), "mixed", lambda node: replace(node, states=()))
    assert first(graph).problem == "its states are none"


def test_op_with_a_state_it_does_not_take() -> None:
    graph = edit(small_graph(), "normed", lambda node: replace(node, states=("history",)))
    assert first(graph).rule == "states"


def test_state_that_is_not_declared() -> None:
    graph = edit(small_graph(), "mixed", lambda node: replace(node, states=("gone",)))
    assert "@gone is not in the graph" in first(graph).problem


def test_cache_of_another_context() -> None:
    found = first(with_state(small_graph(), "keys", type=tensor(DType.BF16, 16, 2, 8)))
    assert found.op == "state @keys"
    assert "32" in found.expected


# Sizes and inputs.


def test_rows_that_are_no_multiple_of_batch() -> None:
    found = first(replace(small_graph(), batch=3))
    assert found.rule == "sizes"
    assert "2 rows for batch 3" in found.problem


@pytest.mark.parametrize("size", ["rows", "batch", "context"])
def test_sizes_below_one(size: str) -> None:
    assert f"{size} is 0" in first(replace(small_graph(), **{size: 0})).problem


def test_input_of_another_type() -> None:
    graph = replace(small_graph(), inputs=(Value(name="tokens", type=H), small_graph().inputs[1]))
    found = first(graph)
    assert (found.rule, found.op) == ("inputs", "input %tokens")
    assert "i32[2]" in found.expected


def test_all_findings_are_counted_in_the_error() -> None:
    graph = replace(small_graph(), rows=0, batch=0)
    with pytest.raises(GraphError, match=f"{len(findings(graph)) - 1} more findings"):
        verify(graph)


def test_finding_names_op_place_expectation_and_change() -> None:
    graph = edit(small_graph(), "logits", lambda node: replace(node, op=Linear(dtype=DType.BF16)))
    assert str(first(graph)) == (
        "small.py:14: linear %logits: its results are f32[2, 64]; expected bf16[2, 64]. "
        "Give the results the types that follow from the operands."
    )


@pytest.mark.parametrize("batch", [1, 8])
def test_traced_models_have_no_findings(batch: int) -> None:
    config = json.loads((Path(models.__path__[0]) / MODEL.default_config).read_text("utf-8"))
    assert findings(MODEL.trace(config, batch=batch, context=4096)) == []
    dense = mkc.trace(decoder, name="dense", batch=batch, context=256)
    assert findings(dense) == []
