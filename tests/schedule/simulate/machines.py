"""Small machine programs, and a target with round numbers to reckon with."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.engine import run
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import MachineProgram
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import RankSkew
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.simulate.machine import Work
from mkc.targets import Target
from mkc.targets import load_target

MARK = Mark(phase="p00", op="test")
COPY = 1000  # bytes of a copy: 1 us on the round target


def round_target() -> Target:
    """Memory 1000 bytes/us, latency 1 us, issue 0.1 us, drain 0.5 us; a chip is 2 us away."""
    target = load_target("tpu7x:2x2x1")
    return replace(
        target,
        hbm=replace(target.hbm, sustained_bytes_per_us=1000),
        dma=replace(target.dma, latency_us=1.0, issue_us=0.1),
        mxu=replace(target.mxu, drain_us=0.5),
        exchange=replace(target.exchange, egress_bytes_per_us=100),
        links=replace(
            target.links,
            issue_us=0.1,
            sibling_latency_us=1.0,
            sibling_bytes_per_us=1000,
            chip_latency_us=2.0,
            chip_bytes_per_us=100,
        ),
    )


def start(semaphore: str = "a", size: int = COPY, *, urgent: bool = False) -> Start:
    return Start(mark=MARK, bytes=size, semaphore=semaphore, urgent=urgent)


def wait(semaphore: str = "a", size: int = COPY, stall: Stall = Stall.TAPE) -> Wait:
    return Wait(mark=MARK, bytes=size, semaphore=semaphore, stall=stall)


def work(us: float, engine: Engine = Engine.VECTOR) -> Work:
    return Work(mark=MARK, us=us, engine=engine)


def send(peer: int, size: int = 100, semaphore: str = "in", sent: str = "") -> Send:
    return Send(mark=MARK, peer=peer, bytes=size, semaphore=semaphore, sent=sent)


def one_rank(*instructions: Instruction) -> Run:
    """Runs instructions on one rank."""
    program = MachineProgram(ranks=1, instructions=lambda rank: iter(instructions))
    return run(program, round_target())


def ranks(
    count: int,
    of: Callable[[int], Iterable[Instruction]],
    *,
    symmetric: bool = False,
    skew: tuple[RankSkew, ...] = (),
) -> Run:
    """Runs instructions that depend on the rank."""
    program = MachineProgram(
        ranks=count, instructions=lambda rank: iter(of(rank)), symmetric=symmetric
    )
    return run(program, round_target(), skew)


def exchange(rank: int, count: int, size: int = 100, semaphore: str = "in") -> list[Instruction]:
    """Everybody sends to everybody."""
    peers = [rank ^ distance for distance in range(count - 1, 0, -1)]
    total = size * len(peers)
    return [
        *[send(peer, size, semaphore) for peer in peers],
        wait(semaphore, total, Stall.EXCHANGE),
    ]
