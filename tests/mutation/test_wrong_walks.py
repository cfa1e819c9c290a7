"""Mistakes in the walk of a drafter whose logits are corrected by the token before, in its
confidences and in the cut of a block; beside their reference meaning.

`docs/verifier.md` lists the kinds.
"""

from __future__ import annotations

import pytest

from mkc.runtime.finish_round import GREEDY
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.test_support_markov import check_cut
from tests.codegen_pallas.test_support_markov import check_walk
from tests.kernel.spark_harness import play
from tests.kernel.spark_harness import session_of
from tests.kernel.test_spark_rounds import CUT as WHOLE
from tests.mutation.wrong import Wrong
from tests.mutation.wrong import names
from tests.mutation.wrong import on_the_page
from tests.mutation.wrong import rewritten
from tests.mutation.wrong import table

MODULE = "mkc.codegen_pallas.support.markov"
HEADING = "mistake in the walk or the cut"
SIZES = (2, 2, 4, True)  # ranks, sequences, rows, rounded


def walk(story: str, *edits: tuple[str, str]) -> Wrong:
    """Lines of `markov_walk` in another form."""
    return Wrong(story=story, name="markov_walk", module=MODULE, instead=rewritten(*edits))


def cut(story: str, *edits: tuple[str, str]) -> Wrong:
    """The same of `cut_drafts`."""
    return Wrong(story=story, name="cut_drafts", module=MODULE, instead=rewritten(*edits))


# The token before a row, which its block of the table and its row in the block are of.
BLOCK, ROW = "block(one, out[before(one)])", "latent_of(sequence, out[here])"

WALK = {
    "anchor": walk(
        "all drafts of a block are corrected by its anchor",
        (BLOCK, "block(one, out[one * rows_per_sequence])"),
        (ROW, "latent_of(sequence, out[sequence * rows_per_sequence])"),
    ),
    "skipped": walk(
        "a step of the chain is skipped: a draft is corrected by the token two rows before",
        (BLOCK, "block(one, out[before(one) - min(row - 1, 1)])"),
        (ROW, "latent_of(sequence, out[here - min(row - 1, 1)])"),
    ),
    "other_sequence": walk(
        "a draft is corrected by the token of another sequence",
        (BLOCK, "block(one, out[before(batch - 1 - one)])"),
        (ROW, "latent_of(sequence, out[before(batch - 1 - sequence)])"),
    ),
    "other_block": walk(
        "a draft is corrected by the block of the table beside that of its token",
        ("& -BF16_ROWS, BF16_ROWS)", "& -BF16_ROWS ^ BF16_ROWS, BF16_ROWS)"),
    ),
    "other_id": walk(
        "a draft is corrected by the row of the table beside that of its token",
        ("(jnp.maximum(token, 0) & (BF16_ROWS - 1))", "(jnp.maximum(token, 0) & 15 ^ 1)"),
    ),
    "given_tokens": walk(
        "drafts are corrected by the tokens of the block, not by those that were chosen",
        (BLOCK, "block(one, tokens[before(one)])"),
        (ROW, "latent_of(sequence, tokens[here])"),
    ),
    "own_logits": walk(
        "a draft is chosen by the logits of its own row, not by those of the row before",
        ("logits.row(here)", "logits.row(here + 1)"),
    ),
    "own_columns": walk(
        "a rank counts its columns from zero, as if it had the beginning of the vocabulary",
        ("columns_per_rank=columns", "columns_per_rank=0"),
    ),
    "own_hidden": walk(
        "a draft's confidence is judged by the row of the draft, not by the one before",
        ("hidden.row(here)", "hidden.row(here + 1)"),
    ),
    "confidence_of_another": walk(
        "a draft is given the confidence of the one behind it",
        ("store_confidence(confidence, here + 1", "store_confidence(confidence, here"),
    ),
    "confidence_without_token": walk(
        "a draft's confidence is judged without the token before it",
        ("latents[-1], head", "0 * latents[-1], head"),
    ),
}
CUT = {
    "late": cut("a block is cut one row late", ("values[here, 0]", "values[here - 1, 0]")),
    "first_sequence": cut(
        "a block is cut by the confidences of the first sequence",
        ("values[here, 0]", "values[row, 0]"),
    ),
    "alone": cut(
        "a doubtful draft is left out, those behind it are not",
        ("going & ~(", "~("),
    ),
    "at_the_threshold": cut(
        "a draft that is just sure enough is left out", ("< threshold", "<= threshold")
    ),
    "never": cut("no block is cut", ("< threshold", "< 0.0")),
    "anchor_cut": cut("a block can be cut in front of its anchor", ("if row:", "if True:")),
}
QUICK = ("skipped",)


@pytest.mark.parametrize("name", names(WALK, QUICK))
def test_a_walk_with_a_mistake_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WALK[name].make(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal|Not equal to tolerance"):
        check_walk(*SIZES)


@pytest.mark.parametrize("name", CUT)
def test_a_cut_with_a_mistake_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CUT[name].make(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_cut()


@pytest.mark.long
@pytest.mark.parametrize("name", ["other_sequence", "confidence_of_another", "late"])
def test_rounds_of_a_whole_kernel_show_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the drafts, or in how many of them the next round looks at."""
    (WALK | CUT)[name].make(monkeypatch)
    session = session_of(WHOLE, 1, 2, Mode.GENERIC)
    with pytest.raises(AssertionError, match="tokens|positions"):
        play(WHOLE, session, (1,) * 4, (GREEDY, GREEDY))


def test_without_a_mistake_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their own words, compiled as the spoiled ones are."""
    for one in (walk("", ("ranks=ranks", "ranks=ranks")), cut("", ("if row:", "if row:"))):
        one.make(monkeypatch)
    check_walk(*SIZES)
    check_cut()


def test_the_list_on_the_page_is_this_one() -> None:
    assert on_the_page("walks") == table(HEADING, WALK | CUT)
