"""What an exchange between ranks needs: its buffers and semaphores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mkc.ir.types import DType
from mkc.schedule.units import VECTOR_LANES

SUBLANES = 8  # rows of a memory tile of 4-byte elements


def scattered_columns(columns: int, ranks: int) -> int:
    """Columns that every rank has an equal share of, in whole registers: at least so many."""
    return -(-columns // (ranks * VECTOR_LANES)) * ranks * VECTOR_LANES


class Part(StrEnum):
    """How much of an exchange a phase does."""

    WHOLE = "whole"
    START = "start"  # the first messages are sent; what needs no result may follow
    FINISH = "finish"  # they are waited for, and everything behind them is done


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Buffers and semaphores of one exchange site group.

    Attributes:
      kind: `one_shot`, `two_phase`, `two_level`, `two_step`, `argmax`, `top_k`, `gather` of bf16
        or `gather_f32`.
      rows, columns: shape of the exchanged array.
      group: how many adjoining ranks exchange among themselves: of two levels the inner one; 0
        for all.
      wire: what partial sums travel as, but those of one shot, which are f32.
      rounds: of two levels, results travel as bf16.
      scattered: of so many columns, the last ones, each rank of a group gets its own share alone.
        Of one shot all the same everything travels.
      safe_because: why a receive buffer is free when the next message arrives.
    """

    name: str
    kind: str
    rows: int
    columns: int
    safe_because: str
    group: int = 0
    wire: DType = DType.F32
    rounds: bool = False
    scattered: int = 0

    @property
    def share(self) -> int:
        """Of two levels or steps, the scattered columns that a rank gets."""
        return self.scattered // self.group if self.group else 0

    @property
    def semaphores(self) -> int:
        """Two for each phase: what was sent, what has arrived."""
        return 6 if self.kind == "two_level" else 4

    @property
    def dense(self) -> tuple[int, int]:
        """Rows and lanes of whole memory tiles that one row of all columns fills, of those that are
        scattered one share."""
        rows = 4 * SUBLANES // self.wire.bytes
        columns = self.columns - self.scattered + self.share
        return rows, -(-columns // (rows * VECTOR_LANES)) * VECTOR_LANES

    @property
    def gathered(self) -> int:
        """Of two levels, columns of a rank's share that it sends to its group at the end."""
        return (self.columns - self.scattered) // self.group


def exchange_buffers(plan: ExchangePlan, ranks: int) -> list[tuple[str, tuple[int, ...], DType]]:
    """VMEM arrays of an exchange: (suffix, shape, dtype); those that others write have a block for
    each of them."""
    members = plan.group or ranks
    whole, part = (plan.rows, plan.columns), (plan.rows, plan.columns // members)
    match plan.kind:
        case "two_phase":
            rounded = [("parts", whole, plan.wire)] if plan.wire is not DType.F32 else []
            return [
                *rounded,
                ("scattered", (ranks, *part), plan.wire),
                ("send", part, DType.BF16),
                ("gathered", (ranks, *part), DType.BF16),
            ]
        case "two_level":
            result = DType.BF16 if plan.rounds else DType.F32
            return [
                ("send", whole, plan.wire),
                ("scattered", (members, *part), plan.wire),
                ("summed", part, plan.wire),
                ("across", (ranks // members, *part), plan.wire),
                ("total", part, result),
                ("gathered", (members, plan.rows, plan.gathered), result),
            ]
        case "two_step":
            return [
                ("staged", plan.dense, DType.F32),
                ("send", (members, *plan.dense) if plan.scattered else plan.dense, plan.wire),
                ("receive", (members, *plan.dense), plan.wire),
                ("summed", plan.dense, plan.wire),
                ("across", (ranks // members, *plan.dense), plan.wire),
            ]
        case "one_shot" | "gather_f32":
            dtype = DType.F32
        case "gather":
            dtype = DType.BF16
        case _:  # values and the numbers of their columns, as integers
            dtype = DType.I32
    return [("send", whole, dtype), ("receive", (members, *whole), dtype)]
