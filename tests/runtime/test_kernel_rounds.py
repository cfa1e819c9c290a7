"""The backend of a kernel that runs rounds, beside the reference backend with the same rounds.

Launches are emulated, on the kernel's operands; the long tests interpret the kernel itself, as
`tests.runtime.test_interpreted_rounds` does once for all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkc.ir.graph import StateKind
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.runtime.backends import kernel_rounds
from mkc.runtime.backends.backend import DraftingBackend
from mkc.runtime.backends.kernel_rounds import KernelRoundsBackend
from mkc.runtime.backends.speculative import SpeculativeBackend
from mkc.runtime.generate import Generator
from mkc.runtime.kernel_rounds import RoundsResult
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Delta
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SamplingParams
from tests.goldens import golden_case
from tests.runtime.constraints import Constraint
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import RoundsBackend
from tests.runtime.rounds_backends import draft
from tests.runtime.rounds_backends import emulated
from tests.runtime.rounds_backends import interpreted
from tests.runtime.rounds_backends import reference

BATCH, CHUNK, LENGTH = 2, 16, 18
STATE_RELATIVE_RMS = 0.03  # as in tests.kernel.harness
PROMPT = golden_case(LANE).expected["prompt"].tolist()[:20]
OTHER = list(range(100, 131))
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, seed=9)


@pytest.fixture(autouse=True)
def compiled_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes most of the time here, and is twice as fast without.
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_backend_optimization_level", 0)


def cleared(backend: RoundsBackend) -> RoundsBackend:
    for slot in range(backend.batch):
        backend.reset(slot)
    return backend


@pytest.fixture(params=["emulated", pytest.param("interpret", marks=pytest.mark.long)])
def kernel(request: pytest.FixtureRequest) -> KernelRoundsBackend:
    open_backend = emulated if request.param == "emulated" else interpreted
    found = cleared(open_backend(LANE, ranks=1, batch=BATCH))
    assert isinstance(found, KernelRoundsBackend)
    return found


@pytest.fixture
def plain() -> SpeculativeBackend:
    found = cleared(reference(LANE, batch=BATCH))
    assert isinstance(found, SpeculativeBackend)
    found.prefill_sizes = (CHUNK,)
    return found


def generator(backend: RoundsBackend, **options: Any) -> Generator:
    return Generator(backend, **({"chunk_rows": CHUNK, "stop_ids": ()} | options))


def tokens_by_sequence(deltas: list[Delta]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for one in deltas:
        found.setdefault(one.sequence, []).extend(one.tokens)
    return found


def counts(statistics: SequenceStatistics) -> tuple[int, ...]:
    found = statistics
    return found.rounds, found.launches, found.drafted, found.accepted, found.output_tokens


def run(backend: RoundsBackend, requests: list[Request]) -> tuple[Any, ...]:
    """Tokens and counts of all sequences, and the states of a slot after a few more rounds."""
    own = generator(backend)
    deltas = list(own.run(requests))
    finished = [one.finish for one in deltas if one.finish is not None]
    return tokens_by_sequence(deltas), [(one.reason, counts(one.statistics)) for one in finished]


def test_it_drafts_for_greedy_sequences(kernel: KernelRoundsBackend) -> None:
    assert isinstance(kernel, DraftingBackend)
    assert (kernel.drafts, kernel.draws) == (7, False)


@pytest.mark.parametrize("batch", [1, BATCH])
def test_tokens_and_counts_are_those_of_the_reference(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend, batch: int
) -> None:
    """Prompts in chunks, launches of several rounds, ends by budget and by a stop id."""
    (tokens, *_), _ = run(plain, [Request(tokens=PROMPT, max_tokens=LENGTH)])[0].values(), None
    stop = next(one for place, one in enumerate(tokens) if tokens.index(one) == place >= 5)
    requests = [
        Request(tokens=PROMPT, max_tokens=LENGTH, stop_ids=frozenset({stop})),
        Request(tokens=OTHER, max_tokens=LENGTH),
        Request(tokens=PROMPT, max_tokens=3),
    ]
    found, wanted = (run(one, requests[: batch + 1]) for one in (kernel, plain))
    assert found == wanted
    first = list(found[0].values())[0]
    assert first == tokens[: tokens.index(stop) + 1]
    assert any(one[0] is FinishReason.STOP for one in found[1])


def test_states_are_those_of_the_reference(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend
) -> None:
    """After a prompt, launches, and a late commit; of both slots."""
    kinds = kernel.session.lowered.steps.sharded.full.states
    states = []
    for backend in (kernel, plain):
        own = generator(backend)
        numbers = [own.add(Request(tokens=one, max_tokens=40)) for one in (PROMPT, OTHER)]
        for number in numbers:
            own.prefill(number)
        own.rounds()
        assert backend._carried.values["kept"].all(), "nothing is left to commit"
        length = {own.slot(one): own._running[one].position for one in numbers}
        states.append({slot: backend.state(slot) for slot in length})
        assert not backend._carried.values["kept"].any()
    for slot, end in length.items():
        found, wanted = (one[slot] for one in states)
        assert found.keys() == wanted.keys()
        for key in wanted:
            mine, other = (np.asarray(one[key], np.float32) for one in (found, wanted))
            if kinds[key].kind is StateKind.KV_CACHE:
                mine, other = mine[:, :end], other[:, :end]
            difference = np.sqrt(np.mean((mine - other) ** 2))
            assert difference < STATE_RELATIVE_RMS * other.std(), key


def test_right_drafts_are_taken(kernel: KernelRoundsBackend, plain: SpeculativeBackend) -> None:
    """Five true tokens, then a wrong one, in the second slot of a launch."""
    for backend in (plain, kernel):
        own = generator(cleared(backend))
        own.drafts = False
        truth = list(own.generate(Request(tokens=PROMPT, max_tokens=LENGTH)).tokens)
        own.drafts = True
        own.add(Request(tokens=OTHER, max_tokens=LENGTH))
        number = own.add(Request(tokens=PROMPT, max_tokens=LENGTH))
        for one in own.running:
            own.prefill(one)
        wrong = [*truth[:6], (truth[6] + 1) % 2048]
        draft(backend, own.slot(number), wrong, len(PROMPT))
        delta = next(one for one in own.rounds(1) if one.sequence == number)
        assert list(delta.tokens) == truth[1:7]
        statistics = own.statistics(number)
        assert (statistics.rounds, statistics.drafted, statistics.accepted) == (1, 6, 5)
        deltas = [delta]
        while own.running:
            deltas += own.rounds()
        assert tokens_by_sequence(deltas)[number] == truth[1:]


def test_drafts_behind_another_token_are_not_used(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend
) -> None:
    """As when the host has chosen another token than the kernel, or another place."""
    for backend in (plain, kernel):
        truth = list(generator(cleared(backend)).generate(greedy_request()).tokens)
        for token, place in ((truth[0] + 1, len(PROMPT)), (truth[0], len(PROMPT) + 1)):
            own = generator(cleared(backend))
            number = own.add(greedy_request())
            own.prefill(number)
            draft(backend, own.slot(number), [token, *truth[1:6]], place)
            (delta,) = own.rounds(1)
            assert list(delta.tokens) == truth[1:2]
            assert own.statistics(number).drafted == 0


def test_steps_take_no_drafts(kernel: KernelRoundsBackend, plain: SpeculativeBackend) -> None:
    """Right ones are there when drafts are switched off: one row is fed, and no more."""
    for backend in (plain, kernel):
        truth = list(generator(cleared(backend)).generate(greedy_request()).tokens)
        own = generator(cleared(backend))
        own.drafts = False
        number = own.add(greedy_request())
        deltas = [own.prefill(number)]
        draft(backend, own.slot(number), truth[:6], len(PROMPT))
        while own.running:
            deltas += own.rounds(1)
        assert tokens_by_sequence(deltas)[number] == truth


def greedy_request() -> Request:
    return Request(tokens=PROMPT, max_tokens=LENGTH)


def test_steps_give_logits_of_their_single_rows(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend
) -> None:
    """Given tokens, in both slots and then in one: each step commits the row of the one before."""
    limits = golden_case(LANE).tolerances
    for backend in (kernel, plain):
        backend.prefill(0, PROMPT, 0)
        backend.prefill(1, OTHER, 0)
    places = [len(PROMPT), len(OTHER)]
    for number in range(5):
        active = [True, number < 3]
        fed, positions = [7 + number, 70 + number], [one + number for one in places]
        found, wanted = (one.step(fed, positions, active) for one in (kernel, plain))
        for slot, on in enumerate(active):
            if on:
                difference = np.abs(found.logits[slot] - wanted.logits[slot]).max()
                assert difference < limits["bf16_logits_abs"]
                assert found.next_token[slot] == found.logits[slot].argmax()


def test_the_host_draws_where_the_kernel_does_not(kernel: KernelRoundsBackend) -> None:
    """A sampled sequence beside a greedy one: no drafts for it, and the other keeps its own."""
    greedy = Request(tokens=OTHER, max_tokens=LENGTH)
    sampled = Request(tokens=PROMPT, max_tokens=LENGTH, sampling=SAMPLED)
    wanted = [list(generator(kernel).generate(one).tokens) for one in (greedy, sampled)]
    found = run(kernel, [greedy, sampled])
    assert list(found[0].values()) == wanted
    drafted = {one[1][2] for one in found[1]}
    assert drafted == {0, 7 * (LENGTH - 2)}, "one drafts in all rounds but the first, one never"


@pytest.mark.parametrize("wanted", [True, False])
def test_masks_are_applied_to_the_rows_of_a_round(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend, wanted: bool
) -> None:
    """With drafts, and in rounds of a single row."""

    def even(output: Any) -> Any:
        allowed = np.arange(2048) % 2 == len(output) % 2
        return allowed

    outputs = []
    for backend in (kernel, plain):
        own = Constraint(even)
        request = Request(tokens=PROMPT, max_tokens=8, constraint=own, draft=wanted)
        outputs.append(list(generator(backend).generate(request).tokens))
    assert outputs[0] == outputs[1]
    assert [one % 2 for one in outputs[0]] == [0, 1] * 4


def test_drafts_off_is_a_token_per_launch(
    kernel: KernelRoundsBackend, plain: SpeculativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds in the kernel draft, so there is one in each launch."""
    for backend in (kernel, plain):
        own = generator(backend)
        own.drafts = False
        output = own.generate(Request(tokens=PROMPT, max_tokens=LENGTH))
        statistics = output.finish.statistics
        assert (statistics.drafted, statistics.rounds) == (0, LENGTH - 1)
    launches = 0
    call = kernel.session.call

    def counted() -> Any:
        nonlocal launches
        launches += 1
        return call()

    monkeypatch.setattr(kernel.session, "call", counted)
    own = generator(kernel)
    own.drafts = False
    own.generate(Request(tokens=PROMPT, max_tokens=LENGTH))
    assert launches == LENGTH - 1


def test_looking_at_a_slot_changes_no_token(kernel: KernelRoundsBackend) -> None:
    """Committing early is committing; the drafts of the slot stay."""
    request = Request(tokens=PROMPT, max_tokens=LENGTH)
    wanted = list(generator(kernel).generate(request).tokens)
    own = generator(kernel)
    number = own.add(request)
    deltas = [own.prefill(number)]
    while own.running:
        deltas += own.rounds(1)
        kernel.state(0)
    assert tokens_by_sequence(deltas)[number] == wanted
    finish = deltas[-1].finish
    assert finish is not None
    assert finish.statistics.drafted == 7 * (LENGTH - 2)


def test_a_neighbours_prompt_commits_nothing_here(kernel: KernelRoundsBackend) -> None:
    """When a slot is committed must not depend on others: bits would."""
    own = generator(kernel)
    first = own.add(Request(tokens=PROMPT, max_tokens=40))
    own.prefill(first)
    own.rounds()
    slot = own.slot(first)
    assert kernel._carried.values["kept"][slot] > 0
    own.prefill(own.add(Request(tokens=OTHER, max_tokens=2)))
    assert kernel._carried.values["kept"][slot] > 0


def test_a_chat_goes_on_after_a_stop(kernel: KernelRoundsBackend) -> None:
    """The second turn's prompt holds the first answer; its beginning comes from the cache."""
    cache = PrefixCache(rows=CHUNK, max_bytes=1 << 30)
    own = generator(kernel, prefix_cache=cache)
    first = own.generate(Request(tokens=PROMPT, max_tokens=LENGTH))
    stop = first.tokens[-1]
    own = generator(kernel, prefix_cache=cache, stop_ids=[stop])
    answer = own.generate(Request(tokens=PROMPT, max_tokens=60))
    assert answer.finish.reason is FinishReason.STOP
    turn = [*PROMPT, *answer.tokens, *OTHER]
    number = own.add(Request(tokens=turn, max_tokens=8))
    cached = own.statistics(number).cached_tokens
    deltas = []
    while own.running:
        deltas += own.rounds()
    assert cached == len(PROMPT) // CHUNK * CHUNK
    fresh = generator(kernel, stop_ids=[stop]).generate(Request(tokens=turn, max_tokens=8))
    assert tokens_by_sequence(deltas)[number] == list(fresh.tokens)


def test_what_the_kernel_leaves_to_the_host_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 1 was not decided in the second round: that round runs again, for it alone."""
    backend = cleared(emulated(LANE, ranks=1, batch=BATCH))
    monkeypatch.setattr(KernelRoundsBackend, "draws", True)
    length = 8
    logits = np.zeros((BATCH, length, 2048), np.float32)
    logits[1, 0, 8] = logits[1, 1, 33] = 9.0  # the first draft is right, the second is not
    nothing = [-1] * length
    places = np.array([[23, *range(24, 31)], [42, 43, 44, *[-1] * 5]], np.int32)
    scripted = [
        RoundsResult(
            tokens=np.array([[[5, *nothing[1:]], [7, *nothing[1:]]], [[6, *nothing[1:]], nothing]]),
            counts=np.array([[1, 1], [1, 0]]),
            drafts=np.zeros((2, BATCH), np.int32),
            carried={
                "tokens": np.array([6, *range(50, 57), 7, 8, 9, *[0] * 5], np.int32),
                "positions": places.reshape(-1),
                "kept": np.array([1, 0], np.int32),
            },
            fetch=lambda: logits,
        ),
        RoundsResult(
            tokens=np.array([[nothing, [8, 33, *nothing[2:]]]]),
            counts=np.array([[0, 2]]),
            drafts=np.array([[0, 2]]),
            carried={
                "tokens": np.array([*[0] * length, 33, *range(60, 67)], np.int32),
                "positions": np.array([*nothing, *range(44, 52)], np.int32),
                "kept": np.array([0, 2], np.int32),
            },
            fetch=lambda: logits,
        ),
    ]
    calls: list[tuple[Any, dict[str, Any]]] = []

    def scripted_launch(session: Any, carried: Any, **options: Any) -> RoundsResult:
        calls.append((carried, options))
        return scripted[len(calls) - 1]

    monkeypatch.setattr(kernel_rounds, "launch_rounds", scripted_launch)
    found = backend.speculate(
        [3, 4],
        [21, 41],
        [True, True],
        rounds=3,
        budgets=[20, 20],
        sampling=[SamplingParams(), SamplingParams(temperature=0.5, top_k=1)],
        seeds=[0, 1],
    )
    assert found.of(0) == [([5], 0), ([6], 0)]
    assert found.of(1) == [([7], 0), ([8, 33], 2)]
    (_, first), (fed, second) = calls
    assert first["rounds"] == [3, 3]
    assert second["rounds"] == [1, 1]
    assert second["budgets"] == [18, 19]
    assert second["forced"].tolist() == [*nothing, 8, 33, *nothing[2:]]
    assert fed["positions"].tolist() == [*nothing, *places[1].tolist()]
    assert fed["tokens"][length : length + 3].tolist() == [7, 8, 9]
    assert fed["kept"].tolist() == [1, 0]
    carried = backend._carried.values
    assert carried["tokens"][[0, length]].tolist() == [6, 33]
    assert carried["positions"][[0, length]].tolist() == [23, 44], "slot 0 keeps its drafts"
    cleared(backend)
