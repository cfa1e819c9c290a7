"""The scheme without drafts: a round is one decode step and the choice of its token.

What a round changes counts once its token is chosen: a kernel that leaves the choice to the host
runs the round again. So states are committed late here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mkc.ir.builder import Trace
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.types import DType
from mkc.model import Model
from mkc.spec.commit import commit_late
from mkc.spec.scheme import KEPT
from mkc.spec.scheme import Round
from mkc.spec.scheme import accept_and_advance
from mkc.spec.scheme import sampling_inputs
from mkc.spec.scheme import step_of
from mkc.spec.scheme import without_unread


def plain_round(target: Model, config: Mapping[str, Any], *, batch: int, context: int) -> Round:
    """One token per round.

    Args:
      config: contents of the target's config.json.

    Raises:
      MkcError: the target builds no valid graph.
    """
    record = Trace(name=target.name, rows=batch, batch=batch, context=context)
    sampling = sampling_inputs(record)
    record.new_input(KEPT, DType.I32, batch)
    with recording(record):
        outputs = target.decoder(target.load_config(config), step_of(record))
        accepted = accept_and_advance(record, outputs, sampling)
    results = {
        "emitted": accepted.emitted,
        "count": accepted.count,
        "logits": outputs.logits,
        "tokens": accepted.last,
        "positions": accepted.positions,
        KEPT: accepted.count,
    }
    return Round(
        name="none",
        graph=without_unread(commit_late(build(record, results), kept=KEPT)),
        prefill=target.trace(config, batch=batch, context=context),
        carried=("tokens", "positions", KEPT),
    )
