"""What a ring of the tape costs: predicted time of one step's weight stream.

A closed form for the choices of passes 30 and 50; `mkc.schedule.simulate` predicts the program.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.passes.steps import Step
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.targets import Target

IDLE_SLOTS = 2  # one is being consumed and one has landed: neither is in flight


@dataclass(frozen=True, kw_only=True)
class RingUse:
    """What one step does with a ring.

    Attributes:
      bytes: of the tape.
      exchanges: how many there are.
    """

    bytes: int
    exchanges: int


def ring_us(use: RingUse, *, slots: int, load_bytes: int, target: Target) -> float:
    """Time of the stream with `slots` loads of `load_bytes`, us.

    The rate is that of the bytes in flight. While the core waits for an exchange, the memory goes
    on until the ring is full. Every load is started and waited for by the core, which is hidden
    unless it takes longer than the bytes.
    """
    in_flight = max(1, slots - IDLE_SLOTS) * load_bytes
    rate = target.stream_bytes_per_us(in_flight)
    exchange_us = target.exchange.latency_us + target.exchange.drain_us
    pause_us = max(0.0, exchange_us - in_flight / rate)
    core_us = use.bytes / load_bytes * (target.dma.issue_us + target.dma.wait_us)
    return max(use.bytes / rate, core_us) + use.exchanges * pause_us


def exchanges_of(body: tuple[Step | StepLoop, ...]) -> int:
    """Sums over ranks in one execution of a body, loops counted."""
    total = 0
    for item in body:
        if isinstance(item, StepLoop):
            total += item.count * exchanges_of(item.body)
        else:
            total += item.kind is StepKind.ALL_REDUCE
    return total
