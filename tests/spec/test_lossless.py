"""The lossless contract: with drafts, and whatever the drafts are, the tokens of plain decoding."""

from __future__ import annotations

import numpy as np

from tests.draft_goldens import draft_case
from tests.draft_goldens import golden_round
from tests.goldens import golden_case
from tests.spec.rounds import Player
from tests.spec.rounds import spec_scheme

CASE = golden_case("qwen38_mini")
PROMPT: list[int] = CASE.expected["prompt"].tolist()
TOKENS: list[int] = CASE.expected["decode.tokens"].tolist()
VOCAB = 1024
BATCH = 4
ROWS = 8


def oracle(emitted: int, wrong: int | None = None) -> list[int]:
    """What comes next, the draft at `wrong` replaced by another token."""
    drafts = TOKENS[emitted : emitted + ROWS - 1]
    return [(one + 1) % VOCAB if place == wrong else one for place, one in enumerate(drafts)]


def play(player: Player, wrong: list[list[int | None] | None], length: int) -> list[list[int]]:
    """Decodes the golden prompt in every sequence that has a plan.

    Args:
      wrong: for each sequence, which draft of each round is wrong, over and over; no plan for the
        drafter's own drafts.

    Returns:
      How many drafts were accepted in each round, by sequence.
    """
    player.prefill([PROMPT] * player.batch)
    player.start([TOKENS[0]] * player.batch, [len(PROMPT)] * player.batch)
    emitted = [TOKENS[:1] for _ in range(player.batch)]
    accepted: list[list[int]] = [[] for _ in range(player.batch)]
    while min(len(one) for one in emitted) < length:
        for number, plan in enumerate(wrong):
            if plan is not None:
                place = plan[len(accepted[number]) % len(plan)]
                player.draft(number, oracle(len(emitted[number]), place))
        found, _ = player.round()
        for number, tokens in enumerate(found):
            emitted[number] = emitted[number] + tokens
            accepted[number].append(len(tokens) - 1)
        for number, one in enumerate(emitted):
            shared = min(len(one), len(TOKENS))
            assert one[:shared] == TOKENS[:shared], f"sequence {number}"
    return accepted


def test_oracle_drafts_are_all_accepted() -> None:
    player = Player(spec_scheme(BATCH), "float32")
    accepted = play(player, [[None]] * BATCH, 40)
    assert all(set(one[:5]) == {7} for one in accepted)


def test_each_draft_of_the_block_wrong_once() -> None:
    """Four sequences side by side, each with other acceptances in every round."""
    plans: list[list[int | None] | None] = [
        [0, 1, 2, 3, 4, 5, 6, None],
        [6, 5, 4, 3, 2, 1, 0],
        [3, None, 0, 5],
        [None, 2],
    ]
    accepted = play(Player(spec_scheme(BATCH), "float32"), plans, 36)
    assert accepted[0][:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert accepted[1][:7] == [6, 5, 4, 3, 2, 1, 0]
    assert accepted[2][:4] == [3, 7, 0, 5]


def test_the_drafters_own_drafts() -> None:
    """Random weights propose what is hardly ever right; two others have an oracle meanwhile."""
    plans: list[list[int | None] | None] = [None, [1], None, [None, 4]]
    player = Player(spec_scheme(BATCH), "float32")
    accepted = play(player, plans, 14)
    expected = draft_case().expected["loop.accepted"].tolist()
    assert accepted[0][: len(expected)] == accepted[2][: len(expected)] == expected


def test_rounds_that_cannot_sample_emit_the_same() -> None:
    """The graph of greedy rounds has no inputs for sampling, and carries no proposals."""
    scheme = golden_round(sampling=False)
    assert set(scheme.carried) == {"tokens", "positions", "kept"}
    assert {one.name for one in scheme.graph.inputs} == set(scheme.carried)
    plan: list[list[int | None] | None] = [[None, 3, 0]]
    both = [play(Player(one, "float32"), plan, 24) for one in (spec_scheme(), scheme)]
    assert both[0] == both[1]


def test_proposals_of_the_whole_loop_are_the_published_ones() -> None:
    """Taps, caches and positions of the drafter through twelve rounds of a running target."""
    player = Player(spec_scheme(BATCH), "float32")
    # A round ends with the drafts for the next one, so the first is fed the prompt's last token.
    player.prefill([PROMPT[:-1]])
    player.start([PROMPT[-1], 0, 0, 0], [len(PROMPT) - 1, -1, -1, -1])
    proposals = draft_case().expected["loop.proposals"]
    for place, expected in enumerate(proposals):
        (emitted, *_), _ = player.round()
        assert emitted == TOKENS[place : place + 1]
        drafts = np.array(player.carried["tokens"])[1:ROWS]
        assert drafts.tolist() == expected.tolist(), f"round {place}"
