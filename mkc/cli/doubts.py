"""What looks wrong in a checkpoint and is no error: said on stderr, and then run as it is."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator

from mkc.errors.tensor_names import number_runs
from mkc.runtime.text import Tokenizer

# Rows of the embedding that have a token, at least. Published checkpoints round the number of rows
# up and reserve some: below 2 % of them have no token.
LEAST_SHARE = 0.9
MOST_RUNS = 8  # of ids, in a line


def doubts(tokenizer: Tokenizer, not_finite: Iterable[str]) -> Iterator[str]:
    """Lines for people.

    Args:
      not_finite: tensors with a NaN or an infinity.
    """
    for name in not_finite:
        yield f"tensor '{name}' has a NaN or an infinity"
    if tokenizer.holes:
        runs = number_runs(tokenizer.holes)
        more = ", ..." if len(runs) > MOST_RUNS else ""
        yield (
            f"{len(tokenizer.holes)} ids between others have no token: "
            f"{', '.join(runs[:MOST_RUNS])}{more}; should the model choose one, its text is empty"
        )
    if tokenizer.tokens < LEAST_SHARE * tokenizer.vocab_size:
        yield (
            f"the tokenizer has {tokenizer.tokens} tokens, the model {tokenizer.vocab_size}: "
            "is it the tokenizer that came with the checkpoint?"
        )
