"""Memory that the walks of drafters need besides their operands."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.types import DType
from mkc.schedule.program import VECTOR_LANES

TABLE_ROWS = 16  # a table row is read with its aligned block of bf16 rows
VECTOR_ROWS = 8  # of a register
SEMAPHORES = 4  # of the candidates' ids, the chosen token, and the candidates of two rows in turn


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """An array in VMEM, in scalar memory (`kind` is `scalars`) or of semaphores (`dma`)."""

    name: str
    kind: str
    shape: tuple[int, ...]


def walk_scratch(k: int, rank: int, batch: int, padded_rows: int) -> tuple[Scratch, ...]:
    """In the order of the arguments of `support.selector_walk`.

    Args:
      k: candidates of a row.
      rank: lanes of a table row.
    """
    bf16 = DType.BF16.value
    return (
        Scratch(name="candidate_ids", kind="scalars", shape=(padded_rows, VECTOR_LANES)),
        Scratch(name="previous", kind=bf16, shape=(batch, TABLE_ROWS, rank)),
        Scratch(name="candidates", kind=bf16, shape=(2, batch * k * TABLE_ROWS, rank)),
        Scratch(name="sems", kind="dma", shape=(SEMAPHORES,)),
    )


def markov_scratch(rank: int, columns: int, batch: int) -> tuple[Scratch, ...]:
    """As named by the arguments of `support.markov_walk`.

    Args:
      rank: lanes of a table row.
      columns: of the logits of one rank.
    """
    rows = -(-batch // VECTOR_ROWS) * VECTOR_ROWS
    return (
        Scratch(name="previous", kind=DType.BF16.value, shape=(batch, TABLE_ROWS, rank)),
        Scratch(name="scores", kind=DType.F32.value, shape=(rows, columns)),
        Scratch(name="sems", kind="dma", shape=(1,)),
    )
