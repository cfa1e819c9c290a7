"""The generator on a backend that drafts: a small target and drafter with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mkc.errors import CheckpointMismatchError
from mkc.ir.types import DType
from mkc.runtime.backends.backend import DraftingBackend
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.backends.speculative import SpeculativeBackend
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Delta
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL
from tests.draft_goldens import draft_values
from tests.generate_weights import checkpoint_tensors
from tests.generate_weights import values
from tests.models.test_dflash2 import SHIPPED
from tests.models.test_dflash2 import changed as small_draft
from tests.models.test_qwen38 import small as small_target
from tests.runtime.constraints import Constraint
from tests.runtime.rounds_backends import draft

BATCH, ROUNDS, CHUNK, CONTEXT = 2, 4, 16, 64
TARGET = small_target(["linear_attention", "full_attention"])
DRAFT = small_draft(
    hidden_size=32,
    intermediate_size=48,
    vocab_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_hidden_layers=1,
    layer_types=["sliding_attention"],
    sliding_window=16,
    num_target_layers=2,
    dflash_config=SHIPPED["dflash_config"]
    | {"target_layer_ids": [0, 1], "mask_token_id": 50, "selector_rank": 4},
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


def small_scheme() -> Round:
    return block_round(MODEL, TARGET, DRAFTER, DRAFT, batch=BATCH, context=CONTEXT)


@cache
def tensors() -> Mapping[str, NDArray[Any]]:
    """Random weights of a small target and a small drafter, by their names in the round."""
    found = {}
    for name, shape, dtype in checkpoint_tensors(small_scheme().graph):
        own = name.removeprefix(DRAFT_NAMESPACE)
        numbers = values(name, shape, 1) if own == name else draft_values(own, shape, 2)
        single = numbers.astype(np.float32)
        found[name] = single.astype(bfloat16) if dtype is DType.BF16 else single
    return found


@cache
def plain_tokens() -> list[int]:
    """What the target emits without drafts."""
    graph = MODEL.trace(TARGET, batch=1, context=CONTEXT)
    backend = ReferenceBackend(graph, tensors().__getitem__, rounds_per_launch=ROUNDS)
    backend.prefill_sizes = (CHUNK,)
    run = Generator(backend, chunk_rows=CHUNK)
    return list(run.generate(Request(tokens=PROMPT, max_tokens=30)).tokens)


@cache
def shared() -> SpeculativeBackend:
    """Compiled once; prompts are fed in chunks, so that there is one prefill program."""
    backend = SpeculativeBackend(small_scheme(), tensors().__getitem__, rounds_per_launch=ROUNDS)
    backend.prefill_sizes = (CHUNK,)
    return backend


@pytest.fixture
def backend() -> SpeculativeBackend:
    found = shared()
    for slot in range(BATCH):
        found.reset(slot)
    return found


def generator(backend: SpeculativeBackend, **options: Any) -> Generator:
    return Generator(backend, **({"chunk_rows": CHUNK} | options))


def tokens_of(deltas: list[Delta], sequence: int) -> list[int]:
    return [token for one in deltas if one.sequence == sequence for token in one.tokens]


def test_it_is_a_drafting_backend(backend: SpeculativeBackend) -> None:
    assert isinstance(backend, DraftingBackend)
    assert backend.drafts == 7


def test_greedy_tokens_are_those_of_plain_decoding(backend: SpeculativeBackend) -> None:
    """Real (random) drafts, in launches of several rounds; the statistics count them."""
    output = generator(backend).generate(Request(tokens=PROMPT, max_tokens=20))
    assert list(output.tokens) == plain_tokens()[:20]
    assert output.finish.reason is FinishReason.LENGTH
    found = output.finish.statistics
    assert found.drafted == 7 * (found.rounds - 1), "the first round has no drafts"
    assert found.output_tokens - 1 <= found.rounds + found.accepted
    assert found.launches < found.rounds


def test_drafts_that_are_right_save_rounds(backend: SpeculativeBackend) -> None:
    """What the drafter would propose is put into the slot: the true tokens, then one wrong one."""
    start = generator(backend)
    number = start.add(Request(tokens=PROMPT, max_tokens=20))
    start.prefill(number)
    carried = backend._carried.values
    rows = carried["tokens"].reshape(BATCH, -1), carried["positions"].reshape(BATCH, -1)
    drafts = plain_tokens()[:8]
    drafts[6] = (drafts[6] + 1) % 64
    rows[0][0], rows[1][0] = drafts, len(PROMPT) + np.arange(8)
    (delta,) = start.rounds(1)
    assert list(delta.tokens) == plain_tokens()[1:7]
    statistics = start.statistics(number)
    assert (statistics.rounds, statistics.drafted, statistics.accepted) == (1, 7, 5)
    while number in start.running:
        (delta,) = start.rounds()
    assert delta.finish is not None


def test_a_stop_id_ends_a_sequence_and_not_the_other(backend: SpeculativeBackend) -> None:
    stop = next(
        one for place, one in enumerate(plain_tokens()) if place == plain_tokens().index(one) >= 3
    )
    requests = [
        Request(tokens=PROMPT, max_tokens=12, stop_ids=frozenset({stop})),
        Request(tokens=PROMPT, max_tokens=12),
    ]
    deltas = list(generator(backend, stop_ids=()).run(requests))
    assert tokens_of(deltas, 0) == plain_tokens()[: plain_tokens().index(stop) + 1]
    assert tokens_of(deltas, 1) == plain_tokens()[:12]


SAMPLED = Request(
    tokens=PROMPT, max_tokens=14, sampling=SamplingParams(temperature=1.1, top_p=0.95, seed=9)
)


def test_a_sampled_sequence_repeats_alone_and_among_others(backend: SpeculativeBackend) -> None:
    """For its seed, in another slot, beside a greedy one; another seed differs."""
    run = generator(backend)
    alone = list(run.generate(SAMPLED).tokens)
    deltas = list(run.run([Request(tokens=PROMPT, max_tokens=20), SAMPLED]))
    numbers = sorted({one.sequence for one in deltas})
    assert tokens_of(deltas, numbers[1]) == alone
    assert tokens_of(deltas, numbers[0]) == plain_tokens()[:20]
    other = replace(SAMPLED, sampling=replace(SAMPLED.sampling, seed=10))
    assert list(run.generate(other).tokens) != alone


def test_the_host_chooses_where_it_must(backend: SpeculativeBackend) -> None:
    """Log-probabilities come from the host, step by step, between rounds with drafts."""
    run = generator(backend)
    plain = run.add(Request(tokens=PROMPT, max_tokens=24))
    deltas = [*run.rounds(), *run.rounds(), *run.rounds(), *run.rounds(1)]
    watched = Request(tokens=PROMPT, max_tokens=5, sampling=SamplingParams(alternatives=2))
    second = run.add(watched)
    while run.running:
        deltas += run.rounds(1)
    assert tokens_of(deltas, plain) == plain_tokens()[:24]
    assert tokens_of(deltas, second) == plain_tokens()[:5]
    shown = [entry for one in deltas if one.sequence == second for entry in one.alternatives]
    assert len(shown) == 5


def changing(divisor: int) -> Constraint:
    """Allows most tokens, depending on all that were emitted."""

    def allowed(output: Sequence[int]) -> NDArray[Any]:
        found: NDArray[Any] = np.arange(64) % divisor != sum(output) % divisor
        return found

    return Constraint(allowed)


@pytest.mark.parametrize("divisor", [3, 5])
def test_a_greedy_sequence_with_masks_drafts(backend: SpeculativeBackend, divisor: int) -> None:
    """Its tokens are those of masked decoding, step by step."""
    outputs = []
    for wanted in (False, True):
        own = changing(divisor)
        one = Request(tokens=PROMPT, max_tokens=24, constraint=own, draft=wanted)
        outputs.append(generator(backend).generate(one))
        assert own.output == list(outputs[-1].tokens)
    plain, drafted = outputs
    assert drafted.tokens == plain.tokens
    assert drafted.tokens != tuple(plain_tokens()[:24]), "nothing was forbidden"
    assert plain.finish.statistics.drafted == 0 < drafted.finish.statistics.drafted


@pytest.mark.parametrize("wrong", [None, 0, 4])
def test_drafts_that_are_right_are_accepted_under_masks(
    backend: SpeculativeBackend, wrong: int | None
) -> None:
    """Masks follow the drafts in the slot, here those of masked decoding."""
    plain = Request(tokens=PROMPT, max_tokens=40, constraint=changing(3), draft=False)
    truth = list(generator(backend).generate(plain).tokens)
    run = generator(backend)
    number = run.add(Request(tokens=PROMPT, max_tokens=25, constraint=changing(3)))
    found = list(run.prefill(number).tokens)
    while number in run.running:
        rows = truth[len(found) - 1 : len(found) + 7]
        if wrong is not None:
            rows[1 + wrong] = (rows[1 + wrong] + 1) % 64
        draft(backend, 0, rows, len(PROMPT) + len(found) - 1)
        (delta,) = run.rounds()
        found += delta.tokens
    assert found == truth[:25]
    statistics = delta.finish.statistics
    assert statistics.rounds == 24 // 8 if wrong is None else -(-24 // (wrong + 1))


def test_a_sampled_sequence_with_masks_drafts(backend: SpeculativeBackend) -> None:
    """Beside one without masks, whose tokens are those that it has alone, as are its own."""

    def masked() -> Request:
        return replace(SAMPLED, max_tokens=20, constraint=changing(3))

    run = generator(backend)
    alone = [run.generate(one) for one in (SAMPLED, masked())]
    for place, token in enumerate(alone[1].tokens):
        assert token % 3 != sum(alone[1].tokens[:place]) % 3
    deltas = list(run.run([SAMPLED, masked()]))
    numbers = sorted({one.sequence for one in deltas})
    for number, one in zip(numbers, alone, strict=True):
        assert tokens_of(deltas, number) == list(one.tokens)
    statistics = alone[1].finish.statistics
    assert statistics.drafted == 7 * (statistics.rounds - 1)


def test_stop_ids_wait_in_rounds_with_drafts(backend: SpeculativeBackend) -> None:
    """What would end the output too early is not allowed, by masks, also behind drafts."""
    stops = frozenset(plain_tokens()[2:6])
    outputs = [
        generator(backend, stop_ids=()).generate(
            Request(tokens=PROMPT, max_tokens=30, min_tokens=12, stop_ids=stops, draft=wanted)
        )
        for wanted in (False, True)
    ]
    assert outputs[0].tokens == outputs[1].tokens
    assert not stops.intersection(outputs[1].tokens[:11])
    assert outputs[1].finish.statistics.drafted > 0


def test_states_do_not_depend_on_when_they_are_committed(backend: SpeculativeBackend) -> None:
    """Looking at a slot commits its kept rows; then it goes on as if nobody had looked."""
    run = generator(backend)
    number = run.add(Request(tokens=PROMPT, max_tokens=20))
    deltas = [run.prefill(number)]
    while run.running:
        deltas += run.rounds(1)
        backend.state(0)
    assert tokens_of(deltas, number) == plain_tokens()[:20]


def test_the_prefix_cache_holds_the_drafters_context(backend: SpeculativeBackend) -> None:
    """A sampled run repeats behind a prompt that was partly known, so its drafts are the same."""
    cache = PrefixCache(rows=CHUNK, max_bytes=1 << 30)
    run = generator(backend, prefix_cache=cache)
    first = list(run.generate(SAMPLED).tokens)
    number = run.add(SAMPLED)
    assert run.statistics(number).cached_tokens == CHUNK
    deltas = []
    while run.running:
        deltas += run.rounds()
    assert tokens_of(deltas, number) == first


def test_two_checkpoints_make_one_backend(tmp_path: Path) -> None:
    """The target's tensors from one folder, the drafter's from another; nothing is compiled."""
    opened = [open_part(tmp_path / name, name) for name in ("target", "draft")]
    scheme = small_scheme()
    found = open_speculative(scheme, *opened)
    assert "scheme dflash2 with up to 7 drafts per round" in found.description
    assert isinstance(found.backend, SpeculativeBackend)
    mine, theirs = found.backend._weights, shared()._weights
    assert mine.keys() == theirs.keys() == scheme.graph.params.keys()
    assert all((np.asarray(mine[key]) == np.asarray(theirs[key])).all() for key in mine)
    with pytest.raises(CheckpointMismatchError, match=r"fc\.weight"):
        open_speculative(scheme, opened[0], opened[0])


def open_part(folder: Path, part: str) -> Checkpoint:
    """A checkpoint of the target or the drafter."""
    is_draft = part == "draft"
    own = {
        name.removeprefix(DRAFT_NAMESPACE): np.ascontiguousarray(one)
        for name, one in tensors().items()
        if name.startswith(DRAFT_NAMESPACE) == is_draft
    }
    folder.mkdir()
    save_file(own, str(folder / "model.safetensors"))
    return Checkpoint.open(folder)
