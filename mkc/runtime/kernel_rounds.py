"""Launches of a kernel that runs whole rounds of a speculative scheme."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from functools import partial

import numpy as np

from mkc.ir.reference_ops import DTYPES
from mkc.runtime.finish_round import GREEDY
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.finish_round import sampling_scalars
from mkc.runtime.kernel import KernelSession
from mkc.runtime.shards import Array
from mkc.runtime.stop_ids import stop_table
from mkc.runtime.token_masks import Masks

CARRIED = ("tokens", "positions", "kept")  # results of a launch that the next one begins with


@dataclass(frozen=True, kw_only=True)
class RoundsResult:
    """Of the rounds that ran.

    Attributes:
      tokens: i32 [rounds, batch, T], -1 behind those that were emitted.
      counts, drafts: i32 [rounds, batch], tokens that were emitted, and drafts that were looked at.
      carried: what the next launch begins with: `tokens`, `positions` i32 [batch * T], `kept` i32
        [batch].
      fetch: brings the logits to the host.
    """

    tokens: Array
    counts: Array
    drafts: Array
    carried: Mapping[str, Array]
    fetch: Callable[[], Array]

    @cached_property
    def logits(self) -> Array:
        """Of the last round, f32 [batch, T, vocab]; the kernel must return them."""
        batch, length = self.tokens.shape[1:]
        return self.fetch().reshape(batch, length, -1)


def launch_rounds(
    session: KernelSession,
    carried: Mapping[str, Array],
    *,
    rounds: Sequence[int],
    budgets: Sequence[int],
    stop_ids: Sequence[Sequence[int]] = (),
    sampling: Sequence[SequenceSampling] = (),
    forced: Array | None = None,
    masks: Masks = (),
) -> RoundsResult:
    """Runs rounds until every sequence has ended or has had its own.

    Args:
      carried: as of `RoundsResult`; a sequence whose first position is negative is idle.
      rounds: of each sequence, 1 to the program's `rounds_per_launch`.
      budgets: tokens that each sequence may still emit; its last round may emit more.
      stop_ids: as for `KernelSession.launch`.
      sampling: options of each sequence, for a kernel that samples; empty for greedy sequences.
      forced: see `mkc.runtime.finish_round`; None for nothing.
      masks: which tokens may follow each row, in all rounds, if the kernel reads masks; empty for
        all.
    """
    program = session.program
    assert program.round is not None, "the kernel runs steps, not rounds"
    most, batch, length = program.rounds_per_launch, program.batch, program.round.rows_per_sequence
    assert all(1 <= one <= most for one in rounds), f"{rounds} rounds in one launch"
    scalars = {
        **carried,
        "rounds": np.asarray(rounds),
        "budgets": np.asarray(budgets),
        "stop_ids": stop_table(stop_ids, batch).reshape(-1),
    }
    if program.round.forced:
        options = sampling or (GREEDY,) * batch
        scalars |= sampling_scalars(options)
        scalars["forced"] = forced_tokens(batch, length, {}) if forced is None else forced
    session.place_masks(masks)
    for operand in program.operands:
        if operand.role in scalars:
            session.place(operand.name, [scalars[operand.role].astype(DTYPES[operand.dtype])])
    emitted, counts, drafts, ran, *rest = session.call()
    number = int(np.asarray(ran)[0])
    return RoundsResult(
        tokens=np.asarray(emitted).reshape(most, batch, length)[:number],
        counts=np.asarray(counts).reshape(most, batch)[:number],
        drafts=np.asarray(drafts).reshape(most, batch)[:number],
        carried={name: np.asarray(one) for name, one in zip(CARRIED, rest, strict=False)},
        fetch=partial(session.logits_of, rest[len(CARRIED)]),
    )
