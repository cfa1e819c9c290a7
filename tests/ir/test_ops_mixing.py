"""Latent attention, residual blocks and scaled heads: facets, and meanings against plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mkc
from mkc.errors import ShapeError
from mkc.ir import ops_mixing
from mkc.ir.cache_form import with_cache_form
from mkc.ir.cost import graph_cost
from mkc.ir.facets import COST
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Repeat
from mkc.ir.infer import infer
from mkc.ir.ops import Op
from mkc.ir.ops_mixing import MIXING_OPS
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import tensor
from mkc.ir.verify import verify
from tests.ir.evaluate_op import evaluate_op
from tests.ir.evaluate_op import normal
from tests.ir.evaluate_op import numbers

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
HEADS, DIM, SHARED, RANK, VALUE, CONTEXT = 3, 4, 2, 5, 6, 9
SCALE = 0.6


def test_every_op_is_complete() -> None:
    defined = {
        one
        for one in vars(ops_mixing).values()
        if isinstance(one, type) and issubclass(one, Op) and one is not Op
    }
    assert defined == set(MIXING_OPS)
    for facet in (INFER, REFERENCE, COST):
        assert [one.__name__ for one in MIXING_OPS if one not in facet.table] == []
    assert {one.mnemonic: one for one in MIXING_OPS}.items() <= MNEMONICS.items()


# Latent attention.


def attention_operands(positions: NDArray[np.int32]) -> list[NDArray[Any]]:
    rows = len(positions)
    return [
        normal(rows, HEADS, DIM),
        normal(rows, HEADS, SHARED),
        normal(rows, RANK),
        normal(rows, SHARED),
        normal(HEADS * (DIM + VALUE), RANK),
        positions,
    ]


def caches(batch: int, form: CacheForm) -> list[NDArray[Any]]:
    sizes = {
        CacheForm.LATENT: [(1, RANK), (1, SHARED)],
        CacheForm.EXPANDED: [(HEADS, DIM + SHARED), (HEADS, VALUE)],
    }
    return [np.zeros((batch, CONTEXT, *size), np.float32) for size in sizes[form]]


def by_hand(operands: list[NDArray[Any]]) -> NDArray[Any]:
    """One sequence from position 0 on: keys and values of every head, softmax of each row."""
    q, shared_q, latent, shared_k, up, _ = operands
    by_head = up.reshape(HEADS, DIM + VALUE, RANK)
    found = np.zeros((len(q), HEADS, VALUE))
    for row in range(len(q)):
        for head in range(HEADS):
            projected = latent[: row + 1] @ by_head[head].T
            scores = projected[:, :DIM] @ q[row, head] + shared_k[: row + 1] @ shared_q[row, head]
            weights = np.exp(scores * SCALE)
            found[row, head] = (weights / weights.sum()) @ projected[:, DIM:]
    return found


@pytest.mark.parametrize("form", CacheForm)
def test_attention_against_the_sum_as_it_is_written(form: CacheForm) -> None:
    operands = attention_operands(numbers(*range(7)))
    op = LatentAttention(scale=SCALE, cache=form)
    (found,), _ = evaluate_op(op, operands, caches(1, form))
    np.testing.assert_allclose(found, by_hand(operands), atol=1e-5)


@pytest.mark.parametrize("form", CacheForm)
def test_later_rows_read_the_cache(form: CacheForm) -> None:
    """Seven rows in two steps, beside a sequence that takes no part; slots ahead hold NaN."""
    operands = attention_operands(numbers(*range(7)))
    op, expected = LatentAttention(scale=SCALE, cache=form), by_hand(operands)
    states = caches(2, form)
    for one in states:
        one[:, 1:] = np.nan
    done = 0
    for count in (4, 3):
        part = [one[done : done + count] for one in operands]
        part[4] = operands[4]
        idle = [np.concatenate([one, np.full_like(one, 7)]) for one in part]
        idle[4], idle[5] = part[4], np.concatenate([part[5], numbers(*[-1] * count)])
        valid = np.array([[True] * count, [False] * count])
        (found,), states = evaluate_op(op, idle, states, valid=valid)
        np.testing.assert_allclose(found[:count], expected[done : done + count], atol=1e-5)
        done += count
        assert np.isnan(states[0][:, done:]).all()
    assert (states[0][1, 0] == 0).all(), "the idle sequence keeps every bit"


def test_a_latent_cache_holds_what_comes_in() -> None:
    operands = attention_operands(numbers(2, 3))
    _, (latent, shared) = evaluate_op(
        LatentAttention(scale=SCALE), operands, caches(1, CacheForm.LATENT)
    )
    assert (latent[0, 2:4, 0] == operands[2]).all()
    assert (shared[0, 2:4, 0] == operands[3]).all()


TYPES = (
    tensor(BF16, 1, HEADS, DIM),
    tensor(BF16, 1, HEADS, SHARED),
    tensor(BF16, 1, RANK),
    tensor(BF16, 1, SHARED),
    tensor(BF16, HEADS * (DIM + VALUE), RANK),
    tensor(I32, 1),
)
STATES = (tensor(BF16, CONTEXT, 1, RANK), tensor(BF16, CONTEXT, 1, SHARED))


@pytest.mark.parametrize(
    ("place", "type_", "message"),
    [
        (1, tensor(BF16, 1, HEADS, SHARED + 1), r"shared q \[rows, 3, 2\]"),
        (4, tensor(BF16, HEADS * DIM, RANK), r"up \[3 heads x \(4 \+ value dim\), 5\]"),
        (4, tensor(BF16, HEADS * (DIM + VALUE), RANK + 1), "up"),
        (2, tensor(BF16, 2, RANK), "latent with 1 rows"),
        (5, tensor(F32, 1), "positions i32"),
    ],
)
def test_operands_that_do_not_fit(place: int, type_: TensorType, message: str) -> None:
    changed = (*TYPES[:place], type_, *TYPES[place + 1 :])
    with pytest.raises(ShapeError, match=message):
        infer(LatentAttention(scale=1.0), changed, STATES)


def test_caches_of_the_other_form() -> None:
    (result,) = infer(LatentAttention(scale=1.0), TYPES, STATES)
    assert (result.shape, result.dtype) == ((1, HEADS, VALUE), BF16)
    op = LatentAttention(scale=1.0, cache=CacheForm.EXPANDED)
    with pytest.raises(ShapeError, match=r"with cache = expanded: .*bf16\[context, 3, 6\]"):
        infer(op, TYPES, STATES)


# Residual blocks.


def mix(count: int, slots: int = 3, **changes: Any) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """A mix of so many blocks, the other slots full of NaN, and its operands."""
    rows, width = 2, 8
    blocks = normal(rows, slots, width)
    blocks[:, count:] = np.nan
    given = [blocks, numbers(*[count] * rows), normal(rows, width), normal(width), normal(1, width)]
    blocks[:, count:] = changes.get("fill", 0.0)
    (found,), _ = evaluate_op(MixBlocks(eps=1e-5), given)
    return found, given


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_mix_is_a_softmax_over_the_stored_ones_and_the_stream(count: int) -> None:
    found, (blocks, _, x, norm, projection) = mix(count, fill=99.0)
    for row in range(len(x)):
        vectors = np.stack([*blocks[row, :count], x[row]])
        root = np.sqrt((vectors**2).mean(axis=1, keepdims=True) + 1e-5)
        weights = np.exp((vectors / root * norm) @ projection[0])
        np.testing.assert_allclose(found[row], weights / weights.sum() @ vectors, atol=1e-5)


def test_a_mix_without_blocks_is_the_stream() -> None:
    """To the last bit, so a first layer may mix too."""
    found, (_, _, x, _, _) = mix(0)
    assert (found == x).all()


def test_blocks_are_stored_one_behind_the_other() -> None:
    first, second = normal(2, 4), normal(2, 4)
    (blocks, count), _ = evaluate_op(ResidualBlocks(slots=3), [first])
    assert blocks.shape == (2, 3, 4) and count.tolist() == [0, 0]
    for vector in (first, second):
        (blocks, count, stream), _ = evaluate_op(StoreBlock(), [blocks, count, vector])
        assert (stream == 0).all()
    assert count.tolist() == [2, 2]
    assert (blocks[:, 0] == first).all() and (blocks[:, 1] == second).all()
    assert (blocks[:, 2] == 0).all()


def test_every_third_layer_stores_and_a_fourth_store_finds_no_room() -> None:
    """The stream starts anew behind a store and goes on unchanged where there is none."""
    vectors = normal(10, 2, 4)
    (blocks, count), _ = evaluate_op(ResidualBlocks(slots=3), [vectors[0]])
    for index, vector in enumerate(vectors):
        (blocks, count, stream), _ = evaluate_op(StoreBlock(period=3), [blocks, count, vector])
        assert (stream == (0 if index % 3 == 0 else vector)).all()
    assert count.tolist() == [10, 10]
    assert (blocks == vectors[[0, 3, 6]].swapaxes(0, 1)).all()


@pytest.mark.parametrize(("count", "stored"), [(0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_a_mixture_sees_what_is_stored(count: int, stored: int) -> None:
    """Of the layers that have offered a vector, the first of three each."""
    blocks, x, norm = normal(2, 3, 4), normal(2, 4), normal(4)
    projection = normal(1, 4)
    every, third = (
        evaluate_op(op, [blocks, np.full(2, number, np.int32), x, norm, projection])[0][0]
        for op, number in ((MixBlocks(eps=1e-5), stored), (MixBlocks(eps=1e-5, period=3), count))
    )
    assert (every == third).all()


def test_blocks_that_do_not_fit() -> None:
    x, count = tensor(BF16, 2, 8), tensor(I32, 2)
    with pytest.raises(ShapeError, match=r"blocks bf16\[2, slots, 8\] and count i32\[2\]"):
        infer(StoreBlock(), (tensor(BF16, 2, 3, 7), count, x))
    with pytest.raises(ShapeError, match="a period of at least one layer"):
        infer(StoreBlock(period=0), (tensor(BF16, 2, 3, 8), count, x))
    with pytest.raises(ShapeError, match="at least one slot"):
        infer(ResidualBlocks(slots=0), (x,))
    given = (tensor(BF16, 2, 3, 8), count, x, tensor(BF16, 8), tensor(BF16, 8))
    with pytest.raises(ShapeError, match=r"projection of shape \[1, 8\]"):
        infer(MixBlocks(eps=1e-5), given)


def test_heads_are_scaled() -> None:
    x, factor = normal(2, HEADS, DIM), normal(HEADS)
    (found,), _ = evaluate_op(ScaleHeads(), [x, factor])
    assert (found == x * factor[:, None]).all()
    with pytest.raises(ShapeError, match="a factor of 3 heads"):
        infer(ScaleHeads(), (tensor(F32, 2, HEADS, DIM), tensor(F32, DIM)))


# As an author writes them.

HIDDEN, PERIOD = 16, 3


def decoder(layers: int) -> Any:
    """A model with a block every PERIOD layers, and latent attention in all of them."""

    def step_function(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [32, HIDDEN])
        h = mkc.embed(step.tokens, table)
        blocks = mkc.residual_blocks(h, -(-layers // PERIOD), period=PERIOD)
        for layer in mkc.layers(layers, prefix="layers.{index}."):
            names = ([HIDDEN], [1, HIDDEN])
            norm, projection = (
                layer.param(f"{name}.weight", axes)
                for name, axes in zip(("norm", "proj"), names, strict=True)
            )
            x = mkc.mix_blocks(blocks, h, norm=norm, projection=projection, eps=1e-5)
            blocks, h = mkc.store_block(blocks, h)
            h = h + attention(step, layer, x)
        return mkc.next_token(h, table)

    return step_function


def attention(step: mkc.Step, layer: mkc.Layer, x: mkc.Tensor) -> mkc.Tensor:
    queries = mkc.heads(HEADS, DIM + SHARED)
    q = mkc.split_heads(mkc.linear(x, layer.param("q.weight", [queries, HIDDEN])))
    both = mkc.linear(x, layer.param("kv.weight", [RANK + SHARED, HIDDEN]))
    o = mkc.latent_attention(
        mkc.slice(q, 0, DIM),
        mkc.slice(q, DIM, SHARED),
        mkc.slice(both, 0, RANK),
        mkc.slice(both, RANK, SHARED),
        layer.param("up.weight", [mkc.heads(HEADS, DIM + VALUE), RANK]),
        positions=step.positions,
        cache=mkc.latent_cache(layer, "kv", rank=RANK, shared=SHARED),
        scale=SCALE,
    )
    out = layer.param("o.weight", [HIDDEN, mkc.heads(HEADS, VALUE)])
    return mkc.linear(mkc.merge_heads(o), out)


def graph_of(layers: int) -> mkc.Graph:
    graph = mkc.trace(decoder(layers), name="mixing", batch=2, context=8)
    verify(graph)
    return graph


def test_a_deeper_model_is_not_a_larger_graph() -> None:
    """How many blocks are stored is a value: layers that read more of them are alike."""
    counts = [len(list(graph_of(layers).body.nodes())) for layers in (9, 18, 90)]
    assert counts[0] == counts[1] == counts[2]
    assert any(isinstance(item, Repeat) for item in graph_of(9).body.items)


def test_the_text_says_all_of_it() -> None:
    graph = graph_of(7)
    assert parse(print_graph(graph)) == graph
    text = print_graph(graph)
    assert "cache = latent" in text and "slots = 3" in text


def test_both_forms_of_the_cache_give_the_same_model() -> None:
    graph = graph_of(5)
    expanded = with_cache_form(graph, CacheForm.EXPANDED)
    verify(expanded)
    assert with_cache_form(expanded, CacheForm.LATENT) == graph
    # Scaled so that a layer keeps the size of its input: scores that grow from layer to layer reach
    # 1e11, whose spacing in f32 is more than the logarithm of the largest number.
    weights = {
        name: normal(*one.type.shape) / np.sqrt(one.type.shape[-1])
        for one in graph.params.values()
        for name in one.tensor_names()
    }
    found = []
    for one in (graph, expanded):
        step = compile_step(one, weights, rounding="float32")
        states: Any = initial_states(one, "float32")
        logits = []
        for position, token in enumerate((3, 9, 4)):
            result = step([token, token + 1], [position] * 2, states)
            states = result.states
            logits.append(np.asarray(result.outputs["logits"]))
        found.append(np.stack(logits))
    np.testing.assert_allclose(found[0], found[1], rtol=2e-4, atol=2e-4)


def test_a_planner_sees_what_the_forms_cost() -> None:
    """An expanded cache is read for every head; a latent one is read once, and folded."""
    graph = mkc.trace(decoder(2), name="mixing", batch=1, context=1024)
    latent, expanded = (graph_cost(with_cache_form(graph, form)) for form in CacheForm)
    assert latent.state_read_bytes == 2 * 1024 * (RANK + SHARED) * 2
    assert expanded.state_read_bytes == 2 * 1024 * HEADS * (DIM + SHARED + VALUE) * 2
    assert latent.state_write_bytes < expanded.state_write_bytes
    assert latent.weight_bytes == expanded.weight_bytes
