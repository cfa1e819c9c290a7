"""Stop ids of a launch, as a table of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkc.runtime.shards import Array
from mkc.schedule.program import STOP_IDS

NO_STOP = -1  # no token has this id


def stop_table(stop_ids: Sequence[Sequence[int]], batch: int) -> Array:
    """i32 [batch, STOP_IDS].

    Args:
      stop_ids: at most `STOP_IDS` token ids that end each sequence; empty for none at all.
    """
    found = np.full((batch, STOP_IDS), NO_STOP, np.int32)
    for sequence, ids in enumerate(stop_ids):
        assert len(ids) <= STOP_IDS, f"{len(ids)} stop ids, at most {STOP_IDS}"
        found[sequence, : len(ids)] = ids
    return found
