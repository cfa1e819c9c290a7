"""Programs of rounds of the golden target and drafter."""

from __future__ import annotations

from functools import cache

from pytest import MonkeyPatch

from mkc.passes.pipeline import Lowered
from tests.draft_goldens import golden_round
from tests.passes.gathered import gather_everything
from tests.passes.lowering import lower

CONTEXT = 96  # six blocks of rows, so that caches have several tiles


@cache
def round_lowered(
    ranks: int,
    *,
    batch: int = 1,
    rounds: int = 1,
    passes: str = "",
    gathers: bool = False,
    sampling: bool = False,
    masks: bool = False,
) -> Lowered:
    """Rounds of `batch` sequences, `rounds` of them in one launch.

    With `sampling` they can draw tokens, with `masks` they read masks of tokens, with `gathers`
    projections are divided that pay only when they are larger.
    """
    scheme = golden_round(batch=batch, context=CONTEXT, sampling=sampling)
    graph = scheme.masked.graph if masks else scheme.graph
    options = filter(None, (passes, f"lower{{rounds={rounds}}}" if rounds > 1 else ""))
    with MonkeyPatch.context() as patch:
        if gathers:
            gather_everything(patch)
        return lower(graph, ranks, ",".join(options))
