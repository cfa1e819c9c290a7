"""Mixtures of experts: every facet, and each meaning against a plain one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import mkc
from mkc.errors import ShapeError
from mkc.ir import ops_experts
from mkc.ir.cost import Cost
from mkc.ir.cost_experts import distinct_experts
from mkc.ir.facets import COST
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.infer import infer
from mkc.ir.ops import Op
from mkc.ir.ops_experts import EXPERT_OPS
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route
from mkc.ir.ops_experts import RouterScore
from mkc.ir.reference import compile_step
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
EXPERTS, WIDTH, INNER, ROWS, TOP = 6, 5, 4, 7, 2


def sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1.0 / (1.0 + np.exp(-x))


def test_every_op_is_complete() -> None:
    defined = {
        one
        for one in vars(ops_experts).values()
        if isinstance(one, type) and issubclass(one, Op) and one is not Op
    }
    assert defined == set(EXPERT_OPS)
    for facet in (INFER, REFERENCE, COST):
        assert [one.__name__ for one in EXPERT_OPS if one not in facet.table] == []
    assert {one.mnemonic: one for one in EXPERT_OPS}.items() <= MNEMONICS.items()


# The choice.


def route(logits: NDArray[Any], *bias: NDArray[Any], **changes: Any) -> list[NDArray[Any]]:
    op = Route(k=TOP, score=RouterScore.SIGMOID, renormalise=True)
    return evaluate_op(replace(op, **changes), [logits, *bias])[0]


def test_the_largest_scores_are_chosen_and_normalised() -> None:
    logits = normal(ROWS, EXPERTS)
    ids, weights = route(logits)
    assert (ids == np.argsort(-logits, axis=1)[:, :TOP]).all()
    scores = np.take_along_axis(sigmoid(logits), ids, axis=1)
    np.testing.assert_allclose(weights, scores / scores.sum(axis=1, keepdims=True), rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = np.zeros((1, EXPERTS), np.float32), np.zeros(EXPERTS, np.float32)
    logits[0, 1], bias[4], bias[2] = 0.3, 0.9, 0.5
    ids, weights = route(logits, bias, renormalise=False, scale=2.0)
    assert ids.tolist() == [[4, 2]]
    assert weights.tolist() == [[1.0, 1.0]]  # twice the sigmoid of zero


def test_ties_go_to_the_lowest_number() -> None:
    ids, _ = route(np.ones((1, EXPERTS), np.float32))
    assert ids.tolist() == [[0, 1]]


def test_a_softmax_over_all_experts() -> None:
    logits = normal(ROWS, EXPERTS)
    ids, weights = route(logits, score=RouterScore.SOFTMAX, renormalise=False)
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(scores, ids, axis=1), rtol=1e-5)


# The experts.


def operands() -> list[NDArray[Any]]:
    x, (ids, weights) = normal(ROWS, INNER), route(normal(ROWS, EXPERTS))
    gate, up = normal(EXPERTS, WIDTH, INNER), normal(EXPERTS, WIDTH, INNER)
    return [x, ids, weights, gate, up, normal(EXPERTS, INNER, WIDTH)]


def plain(
    x: NDArray[Any],
    ids: NDArray[Any],
    weights: NDArray[Any],
    *matrices: NDArray[Any],
    **caps: float,
) -> NDArray[Any]:
    """Row by row and expert by expert."""
    found = np.zeros_like(x)
    for row in range(x.shape[0]):
        for number, weight in zip(ids[row], weights[row], strict=True):
            gate, up, down = (one[number] for one in matrices)
            g, u = gate @ x[row], up @ x[row]
            linear, other = g, u
            if caps:
                linear = caps["gate_cap"] * np.tanh(g / caps["gate_cap"])
                other = caps["up_cap"] * np.tanh(u / caps["up_cap"])
            found[row] += weight * (down @ (linear * sigmoid(g) * other))
    return found


@pytest.mark.parametrize("caps", [{}, {"gate_cap": 0.7, "up_cap": 1.3}])
def test_experts_against_the_sum_as_it_is_written(caps: dict[str, float]) -> None:
    given = operands()
    (found,), _ = evaluate_op(ExpertMlp(**caps), given)
    np.testing.assert_allclose(found, plain(*given, **caps), atol=1e-5)


def test_an_expert_that_nobody_chose_has_no_influence() -> None:
    given = operands()
    given[1] = np.where(given[1] == 3, 4, given[1])
    (expected,), _ = evaluate_op(ExpertMlp(), given)
    for matrix in given[3:]:
        matrix[3] = np.nan
    (found,), _ = evaluate_op(ExpertMlp(), given)
    assert (found == expected).all()


def test_outputs_of_experts_are_rounded() -> None:
    """To bf16 where x is: products, the gated value, outputs; then one sum in f32."""
    given = operands()
    types = [tensor(BF16, *given[0].shape), *(tensor(I32, ROWS, TOP), tensor(F32, ROWS, TOP))]
    types += [tensor(BF16, *one.shape) for one in given[3:]]
    narrow = [one.astype(bfloat16) for one in (given[0], *given[3:])]
    stored = [narrow[0], *given[1:3], *narrow[1:]]
    (found,), _ = evaluate_op(ExpertMlp(), stored, types=types, rounding="reference")
    assert found.dtype == bfloat16

    def rounded(value: NDArray[Any]) -> NDArray[Any]:
        return value.astype(bfloat16).astype(np.float32)

    x, gate, up, down = (one.astype(np.float32) for one in narrow)
    for row in range(ROWS):
        total = np.zeros(INNER, np.float32)
        for number, weight in sorted(zip(given[1][row], given[2][row], strict=True)):
            g, u = rounded(gate[number] @ x[row]), rounded(up[number] @ x[row])
            total += weight * rounded(down[number] @ rounded(g * sigmoid(g) * u))
        np.testing.assert_allclose(found[row].astype(np.float32), rounded(total), rtol=2**-7)


def test_packed_experts_are_their_values() -> None:
    """One matrix packed, the others not: each is told by its own type."""
    width = 32
    x, ids, weights = normal(2, 4), numbers([1, 0], [1, 2]), normal(2, 2)
    gate, up = normal(3, width, 4), normal(3, width, 4)
    codes = np.full((3, 4, width // 2), 0x31, np.uint8)  # 0.5, 1.5, ...
    scales = np.full((3, 4, 1), 128, np.uint8)
    down = np.broadcast_to(np.tile([1.0, 3.0], width // 2), (3, 4, width)).astype(np.float32)
    types = [tensor(F32, *one.shape) for one in (x, ids, weights, gate, up)]
    types[1] = tensor(I32, 2, 2)
    types += [tensor(DType.E2M1X2, *codes.shape), tensor(DType.E8M0, *scales.shape)]
    (found,), _ = evaluate_op(ExpertMlp(), [x, ids, weights, gate, up, codes, scales], types=types)
    (expected,), _ = evaluate_op(ExpertMlp(), [x, ids, weights, gate, up, down])
    assert (found == expected).all()


# Types.

X, IDS, WEIGHTS = tensor(BF16, 1, 64), tensor(I32, 1, 2), tensor(F32, 1, 2)
GATE, DOWN = tensor(BF16, 8, 32, 64), tensor(BF16, 8, 64, 32)
CODES, SCALES = tensor(DType.E2M1X2, 8, 32, 32), tensor(DType.E8M0, 8, 32, 2)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([GATE, GATE], "three matrices: gate, up, down"),
        ([GATE, GATE, GATE], r"down \[8, 64, 32\]"),
        ([GATE, CODES, DOWN], r"scales e8m0\[8, 32, 2\] behind codes e2m1x2\[8, 32, 32\]"),
        ([CODES, SCALES, CODES, tensor(DType.E8M0, 8, 32, 1), DOWN], "Pass the scales of each"),
        ([tensor(BF16, 8, 32, 63), GATE, DOWN], r"gate \[8, 32, 64\]"),
        ([GATE, tensor(BF16, 7, 32, 64), DOWN], r"up \[8, 32, 64\]"),
    ],
)
def test_matrices_that_do_not_fit(matrices: list[TensorType], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(ExpertMlp(), (X, IDS, WEIGHTS, *matrices))


def test_a_router_that_does_not_fit() -> None:
    op = Route(k=9, score=RouterScore.SIGMOID, renormalise=True)
    with pytest.raises(ShapeError, match="k from 1 to 8"):
        infer(op, (tensor(F32, 1, 8),))
    with pytest.raises(ShapeError, match=r"a bias f32\[8\]"):
        infer(replace(op, k=2), (tensor(F32, 1, 8), tensor(F32, 7)))
    with pytest.raises(ShapeError, match=r"ids i32\[1, k\] and weights"):
        infer(ExpertMlp(), (X, IDS, tensor(BF16, 1, 2), GATE, GATE, DOWN))


# Cost.


def test_rows_share_experts() -> None:
    """Published table of a model with 896 experts, 16 of which a row chooses."""
    assert distinct_experts(896, 16, 1) == pytest.approx(16)
    counts = [round(distinct_experts(896, 16, rows), 1) for rows in (2, 4, 8, 9, 16)]
    assert counts == [31.7, 62.3, 120.3, 134.1, 224.4]


def test_only_chosen_experts_are_loaded() -> None:
    cost = COST.find(ExpertMlp())
    assert cost is not None
    packed_down = [tensor(DType.E2M1X2, 8, 64, 16), tensor(DType.E8M0, 8, 64, 1)]
    found: Cost = cost(
        ExpertMlp(), [X, IDS, WEIGHTS, CODES, SCALES, CODES, SCALES, *packed_down], [], [X]
    )
    one_expert = 2 * (32 * 32 + 32 * 2) + 64 * 16 + 64
    assert found.weight_bytes == 2 * one_expert
    assert found.flops == 2 * 2 * 3 * 32 * 64
    assert found.mxu_pushes == 2 * 3


# As an author writes it.


def decoder(step: mkc.Step) -> mkc.Outputs:
    table = mkc.param("embed.weight", [64, 32])
    h = mkc.embed(step.tokens, table)
    for layer in mkc.layers(3, prefix="layers.{index}."):
        logits = mkc.linear(h, layer.param("gate.weight", [4, 32]), dtype=mkc.F32)
        ids, weights = mkc.route(logits, 2, bias=layer.param("gate.bias", [4], mkc.F32))
        codes = layer.param("experts.{member}.down_packed", [4, 32, 32], DType.E2M1X2)
        scales = layer.param("experts.{member}.down_scale", [4, 32, 2], DType.E8M0)
        gate = layer.param("experts.{member}.gate", [4, 64, 32])
        up = layer.param("experts.{member}.up", [4, 64, 32])
        h = h + mkc.expert_mlp(h, ids, weights, gate=gate, up=up, down=(codes, scales))
    return mkc.next_token(h, table)


def test_experts_are_tensors_of_their_own_in_a_checkpoint() -> None:
    graph = mkc.trace(decoder, name="experts", batch=1, context=8)
    verify(graph)
    assert parse(print_graph(graph)) == graph
    gate = graph.params["layers.{index}.experts.{member}.gate"]
    assert gate.type.shape == (4, 64, 32)
    assert (gate.tensor_type.shape, gate.tensor_type.dtype) == ((64, 32), BF16)
    names = gate.tensor_names()
    assert len(names) == len(set(names)) == 12
    assert names[:5] == (
        *[f"layers.0.experts.{n}.gate" for n in range(4)],
        "layers.1.experts.0.gate",
    )


def test_members_are_stacked_in_order() -> None:
    """Each expert of each layer scales by a number of its own; a wrong order gives another sum."""
    graph = mkc.trace(decoder, name="experts", batch=1, context=8)
    weights: dict[str, NDArray[Any]] = {}
    for param in graph.params.values():
        for name in param.tensor_names():
            shape = param.tensor_type.shape
            is_byte = param.type.dtype in (DType.E2M1X2, DType.E8M0)
            weights[name] = np.zeros(shape, np.uint8) if is_byte else np.zeros(shape, np.float32)
    weights["embed.weight"] = np.eye(64, 32, dtype=np.float32)
    chosen = {0: (1, 3), 1: (0, 2), 2: (2, 3)}
    for layer, (first, second) in chosen.items():
        bias = np.zeros(4, np.float32)
        bias[[first, second]] = 1.0
        weights[f"layers.{layer}.gate.bias"] = bias
        for number in range(4):
            prefix = f"layers.{layer}.experts.{number}."
            weights[prefix + "gate"] = np.full((64, 32), 20.0, np.float32)  # passes through
            weights[prefix + "up"] = np.full((64, 32), 1.0, np.float32)
            weights[prefix + "down_packed"] = np.full((32, 32), 0x22, np.uint8)
            weights[prefix + "down_scale"] = np.full((32, 2), 100 + 4 * layer + number, np.uint8)
    step = compile_step(graph, weights, rounding="float32")
    found = step([5], [0], {}).outputs["logits"]
    total = 1.0  # the sum of h
    for layer, numbers_ in chosen.items():
        scale = np.mean([2.0 ** (100 + 4 * layer + number - 127) for number in numbers_])
        total += 32 * 64 * scale * (20 * total) * total
    assert float(np.asarray(found)[0, :32].sum()) == pytest.approx(total, rel=1e-5)


def test_situ_is_the_experts_activation() -> None:
    """Written with elementary operations, it gives what an expert does."""

    def both(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [64, 32])
        h = mkc.embed(step.tokens, table)
        gate, up = mkc.param("gate", [1, 32, 32]), mkc.param("up", [1, 32, 32])
        ids, weights = mkc.route(mkc.linear(h, mkc.param("router", [1, 32]), dtype=mkc.F32), 1)
        down = mkc.param("down", [1, 32, 32])
        caps = {"gate_cap": 4.0, "up_cap": 25.0}
        routed = mkc.expert_mlp(h, ids, weights, gate=gate, up=up, down=down, **caps)
        flat = [mkc.linear(h, mkc.param(f"flat_{one}", [32, 32])) for one in ("gate", "up")]
        dense = mkc.linear(mkc.situ(*flat, **caps), mkc.param("flat_down", [32, 32]))
        return mkc.Outputs(next_token=mkc.argmax(routed), logits=mkc.subtract(routed, dense))

    graph = mkc.trace(both, name="both", batch=1, context=8)
    # A score near zero would show the constant that its normalisation adds.
    weights = {"embed.weight": 3 * normal(64, 32), "router": 0.01 * normal(1, 32)}
    for name in ("gate", "up", "down"):
        weights[name] = normal(1, 32, 32)
        weights[f"flat_{name}"] = weights[name][0]
    step = compile_step(graph, weights, rounding="float32")
    for token in range(8):
        difference = np.abs(np.asarray(step([token], [0], {}).outputs["logits"])).max()
        # u / 25 and u * (1 / 25) differ in the last bit; sums are around 100.
        assert difference < 1e-3
