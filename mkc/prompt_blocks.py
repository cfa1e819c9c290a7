"""How a prompt is cut into blocks for which prefill programs are compiled."""

from __future__ import annotations

from collections.abc import Sequence

# A block costs one reading of all weights, whatever its size, until its products take longer: that
# is at some hundred rows. Larger blocks only shorten the rest of a long prompt.
BLOCK_ROWS = (16, 64, 256)
LONG_BLOCK_ROWS = 1024
LONG_CONTEXT = 8192  # from which prompts of several long blocks are common


def block_sizes(context: int) -> tuple[int, ...]:
    """Rows of the programs for a context, ascending: at most four."""
    sizes = BLOCK_ROWS if context < LONG_CONTEXT else (*BLOCK_ROWS, LONG_BLOCK_ROWS)
    return tuple(size for size in sizes if size <= context) or (context,)


def divide_prompt(tokens: int, sizes: Sequence[int]) -> list[int]:
    """Programs for a prompt, by their rows: the fewest blocks; the last one has the padding."""
    assert tokens >= 1, "an empty prompt"
    largest = max(sizes)
    full, rest = divmod(tokens, largest)
    return [largest] * full + ([min(size for size in sizes if size >= rest)] if rest else [])
