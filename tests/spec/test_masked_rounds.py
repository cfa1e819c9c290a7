"""Rounds with masks of tokens: whatever the drafts are, the tokens of masked decoding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mkc.runtime.token_masks import pack_mask
from mkc.spec import Round
from tests.goldens import golden_case
from tests.spec.rounds import Player
from tests.spec.rounds import spec_scheme

CASE = golden_case("qwen38_mini")
PROMPT: list[int] = CASE.expected["prompt"].tolist()
VOCAB, ROWS, LENGTH = 1024, 8, 20
WRONG = (None, 0, 3, 6)  # a draft of each sequence that is another one


def mask_behind(output: Sequence[int]) -> NDArray[np.uint32]:
    """Two of three tokens, depending on all that were emitted."""
    return pack_mask(np.arange(VOCAB) % 3 != sum(output) % 3)


def masked_player() -> Player:
    player = Player(masked_scheme(), "float32")
    player.prefill([PROMPT] * player.batch)
    player.start([CASE.expected["decode.tokens"][0]] * player.batch, [len(PROMPT)] * player.batch)
    return player


def masked_scheme() -> Round:
    return spec_scheme(len(WRONG)).masked


def decoded() -> list[int]:
    """Masked decoding, without drafts: each token under the mask behind the tokens before it."""
    player = masked_player()
    emitted = [int(CASE.expected["decode.tokens"][0])]
    while len(emitted) < LENGTH + ROWS:
        for sequence in range(player.batch):
            player.draft(sequence, [])
        player.masks = [mask_behind(emitted)] * (player.batch * ROWS)
        (first, *others), logits = player.round()
        assert all(one == first for one in others)
        assert (logits[0, 0] == -np.inf).sum() in (VOCAB // 3, VOCAB // 3 + 1)
        assert len(first) == 1
        assert first[0] % 3 != sum(emitted) % 3
        emitted += first
    return emitted


def test_with_drafts_the_tokens_are_those_of_masked_decoding() -> None:
    """Right drafts are all accepted, and of others those in front of the wrong one; the masks are
    those along the drafts, so behind a wrong draft they are wrong, too."""
    truth = decoded()
    plain = CASE.expected["decode.tokens"].tolist()
    assert truth[1:9] != plain[1:9], "nothing was forbidden"
    player = masked_player()
    emitted = [truth[:1] for _ in WRONG]
    accepted: list[list[int]] = [[] for _ in WRONG]
    while min(map(len, emitted)) < LENGTH:
        masks = []
        for sequence, (mine, wrong) in enumerate(zip(emitted, WRONG, strict=True)):
            drafts = truth[len(mine) : len(mine) + ROWS - 1]
            if wrong is not None and wrong < len(drafts):
                drafts[wrong] = (drafts[wrong] + 1) % VOCAB
            player.draft(sequence, drafts)
            behind = [mask_behind([*mine, *drafts[:count]]) for count in range(len(drafts) + 1)]
            masks += behind + [None] * (ROWS - len(behind))
        player.masks = masks
        tokens, _ = player.round()
        for sequence, one in enumerate(tokens):
            emitted[sequence] = emitted[sequence] + one
            accepted[sequence].append(len(one) - 1)
            shared = min(len(emitted[sequence]), len(truth))
            assert emitted[sequence][:shared] == truth[:shared], f"sequence {sequence}"
    assert [one[0] for one in accepted] == [7, 0, 3, 6]


def test_a_draft_that_is_not_allowed_is_not_accepted() -> None:
    """What plain decoding would say next, and its first token is forbidden: one is emitted."""
    plain = CASE.expected["decode.tokens"].tolist()
    player = masked_player()
    masks: list[NDArray[np.uint32] | None] = [None] * (player.batch * ROWS)
    for sequence, place in enumerate((0, 2, 5, 6)):
        player.draft(sequence, plain[1:ROWS])
        masks[sequence * ROWS + place] = pack_mask(np.arange(VOCAB) != plain[place + 1])
    player.masks = masks
    tokens, _ = player.round()
    for place, one in zip((0, 2, 5, 6), tokens, strict=True):
        assert one[:-1] == plain[1 : place + 1]
        assert one[-1] != plain[place + 1]
