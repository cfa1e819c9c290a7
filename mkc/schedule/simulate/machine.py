"""The machine program: what the simulator executes.

A rank's program is a stream of four kinds of instructions, in the order of execution with every
loop unrolled. Programs of the compiler are translated into it (`translate`), and so are published
kernels whose times are known (`bench/calibration`): the same simulator runs both.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Engine(StrEnum):
    """What is busy while the core works."""

    VECTOR = "vector"
    MATRIX = "matrix"
    CONTROL = "control"


class Stall(StrEnum):
    """Why a core waits."""

    TAPE = "tape"  # a load of the weight tape has not landed
    COPY = "copy"  # another copy has not landed
    EXCHANGE = "exchange"  # a peer's message has not arrived
    BARRIER = "barrier"  # not every rank has come
    DRAIN = "matrix drain"  # results are still in the matrix unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What an instruction belongs to.

    Attributes:
      phase: phase id, or a word such as `prologue` outside phases.
      op: name of the phase's result or operation, for people.
      layer: number of the layer in execution order, -1 outside layers.
      round: number of the round.
    """

    phase: str
    op: str = ""
    layer: int = -1
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The core is busy for `us`. Vector work waits for the results of the matrix unit."""

    mark: Mark
    us: float
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Starts a copy between HBM and VMEM; its bytes arrive at a semaphore.

    Attributes:
      urgent: it overtakes copies that are not.
      slot: ring slot, -1 when there is none.
    """

    mark: Mark
    bytes: int
    semaphore: str
    urgent: bool = False
    slot: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Waits until `bytes` have arrived at a semaphore, and takes them off."""

    mark: Mark
    bytes: int
    semaphore: str
    stall: Stall
    slot: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Starts a copy into a peer's memory.

    Attributes:
      semaphore: of the peer, where the bytes arrive.
      sent: of the sender, told when they have left; empty for a signal.
    """

    mark: Mark
    peer: int
    bytes: int
    semaphore: str
    sent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStart:
    """A round begins here."""

    mark: Mark


type Instruction = Work | Start | Wait | Send | RoundStart


@dataclass(frozen=True, kw_only=True)
class RankSkew:
    """How one rank differs from the others.

    Attributes:
      start_us: it enters the kernel this much later.
      memory_scale: its memory's rate in parts of the usual one.
    """

    start_us: float = 0.0
    memory_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MachineProgram:
    """Programs of all ranks.

    Attributes:
      instructions: rank -> its instructions, new ones at every call.
      symmetric: all ranks execute the same instructions and rank r's k-th message of an exchange
        has the same class of link as the k-th it receives. Without skew all ranks then have the
        same times, and one of them stands for all.
    """

    ranks: int
    instructions: Callable[[int], Iterator[Instruction]]
    symmetric: bool = False
