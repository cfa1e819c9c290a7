"""Masks as an input of a graph: meaning, text, rows, and graphs that cannot have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkc.errors import ShapeError
from mkc.errors import UnsupportedGraphError
from mkc.ir.infer import infer
from mkc.ir.ops import Argmax
from mkc.ir.ops import MaskTokens
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.text import print_graph
from mkc.ir.text_parse import parse
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.ir.token_masks import with_token_masks
from mkc.ir.types import DType
from mkc.ir.types import tensor
from mkc.ir.verify import verify
from mkc.runtime.token_masks import mask_rows
from mkc.runtime.token_masks import pack_mask
from tests.goldens import golden_case

type Array = np.ndarray

VOCAB = golden_case("qwen38_lane").expected["prefill.logits"].shape[-1]


def outputs(masks: list[Array | None]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Outputs of one step of three sequences, without and with masks."""
    case = golden_case("qwen38_lane")
    plain = case.graph(batch=3)
    masked = with_token_masks(plain)
    inputs = {"tokens": np.array([5, 6, 7]), "positions": np.zeros(3, np.int32)}
    words = mask_rows(masks, VOCAB)
    found = []
    for graph, more in ((plain, {}), (masked, {TOKEN_MASKS: words})):
        weights, states = stack_params(graph, case.weights()), initial_states(graph)
        results, _ = step_outputs(graph, weights, {**inputs, **more}, states)
        found.append({key: np.asarray(one) for key, one in results.items()})
    return found[0], found[1]


def test_tokens_that_are_not_allowed_are_never_next() -> None:
    allowed = np.random.default_rng(0).uniform(size=VOCAB) < 0.1
    plain, masked = outputs([None, pack_mask(allowed), pack_mask(np.zeros(VOCAB, bool))])
    np.testing.assert_array_equal(masked["logits"][0], plain["logits"][0])
    expected = np.where(allowed, plain["logits"][1], -np.inf)
    np.testing.assert_array_equal(masked["logits"][1], expected)
    assert masked["next_token"].tolist() == [
        plain["next_token"][0],
        expected.argmax(),
        0,  # where nothing is allowed
    ]


def test_a_masked_graph_verifies_and_round_trips() -> None:
    graph = with_token_masks(golden_case("qwen38_lane").graph(batch=3))
    verify(graph)
    assert parse(print_graph(graph)) == graph
    wider = with_rows_per_sequence(graph, 4)
    verify(wider)
    assert wider.inputs[-1].type.shape == (12, graph.inputs[-1].type.shape[1])


def test_only_the_largest_of_the_logits_can_be_masked() -> None:
    graph = golden_case("qwen38_lane").graph()
    (argmax,) = (one for one in graph.body.items if isinstance(getattr(one, "op", None), Argmax))
    other = replace(graph, outputs={**graph.outputs, "logits": argmax.results[0].name})
    with pytest.raises(UnsupportedGraphError, match="not chosen by the output 'logits'"):
        with_token_masks(other)


def test_masks_have_a_bit_for_every_token_of_every_rank() -> None:
    x = tensor(DType.F32, 3, 40)
    assert infer(MaskTokens(), (x, tensor(DType.I32, 3, 2)), ()) == (x,)
    assert infer(MaskTokens(ranks=4), (x, tensor(DType.I32, 3, 5)), ()) == (x,)
    with pytest.raises(ShapeError, match=r"masks i32\[3, 5\]"):
        infer(MaskTokens(ranks=4), (x, tensor(DType.I32, 3, 2)), ())
