"""Masks of tokens: words, and the order in which a kernel reads them."""

from __future__ import annotations

import numpy as np
import pytest

from mkc.runtime.token_masks import mask_rows
from mkc.runtime.token_masks import pack_mask
from mkc.runtime.token_masks import unpack_mask


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_words_have_a_bit_for_each_token(vocab: int) -> None:
    allowed = np.random.default_rng(vocab).uniform(size=vocab) < 0.5
    words = pack_mask(allowed)
    assert words.dtype == np.uint32
    for token in range(vocab):
        assert bool(words[token // 32] >> (token % 32) & 1) == allowed[token]
    np.testing.assert_array_equal(unpack_mask(words, vocab), allowed)


def test_rows_without_a_mask_allow_everything() -> None:
    mask = pack_mask(np.arange(40) == 33)
    np.testing.assert_array_equal(mask_rows([None, mask], 40), [[-1, -1], [0, 2]])


def test_a_mask_of_another_vocabulary_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="words for 100 tokens"):
        unpack_mask(pack_mask(np.ones(40, bool)), 100)
