"""Published kernels as machine programs: what they stream, through which ring, and who they meet.

Only what was published about them is in here: bytes and shapes of tiles, ring slots, how waits are
grouped, exchange algorithms, times of their vector stages. Nothing of their code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import MachineProgram
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import RoundStart
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.simulate.machine import Work
from mkc.targets import Target

BLOCK_BYTES = 256 * 256 * 2  # of the weights that one push time is for
F32, BF16 = 4, 2
REGISTER_BYTES = 8 * 128 * 4
LOADS_PER_CYCLE = 3  # vector registers, as the compiler's slot table says
ARENA = "arena"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A weight matrix, as the tiles it is read in.

    Attributes:
      tiles: how many.
      tile_bytes: bytes of one tile in memory.
      ring: name of the ring that its tiles pass through.
      push_scale: pushes per byte in parts of those of bf16 weights.
      vector_us: vector work in front of it that needs what was computed before.
    """

    tiles: int
    tile_bytes: int
    ring: str = ARENA
    push_scale: float = 1.0
    vector_us: float = 0.0

    @property
    def bytes(self) -> int:
        return self.tiles * self.tile_bytes


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An all-reduce or all-gather of everybody with everybody.

    Attributes:
      message_bytes: to one peer, per phase of the algorithm.
      add_bytes: what a rank adds up after each phase.
    """

    message_bytes: tuple[int, ...]
    add_bytes: tuple[int, ...]
    peers: tuple[tuple[int, ...], ...] = ()  # XOR distances per phase; empty: all, farthest first


@dataclass(frozen=True, kw_only=True)
class StreamKernel:
    """A kernel that reads the matrices of its layers once.

    Attributes:
      layers: each a sequence of matrices and exchanges.
      slots: per ring.
      ranks: devices that run it.
      copies: False: weights are resident, nothing is copied or waited for.
      stub_bytes: copies move this many bytes instead of a tile; 0 for whole tiles.
      dots: False: the weights are not used.
      group: tiles per wait; their slots are refilled together.
      tiles_per_step: tiles in the body of a loop.
      stores_results: every loop step stores its result, so it waits for the matrix unit to drain.
      filled: the rings are full when the clock starts.
    """

    layers: tuple[tuple[Matrix | Exchange, ...], ...]
    slots: dict[str, int] = field(default_factory=dict)
    ranks: int = 1
    copies: bool = True
    stub_bytes: int = 0
    dots: bool = True
    group: int = 1
    tiles_per_step: int = 1
    stores_results: bool = False
    filled: bool = False

    @property
    def bytes(self) -> int:
        """Weight bytes."""
        return sum(one.bytes for layer in self.layers for one in layer if isinstance(one, Matrix))


def one_shot(payload_bytes: int, ranks: int) -> Exchange:
    """Everybody sends everything to everybody and adds up."""
    return Exchange(message_bytes=(payload_bytes,), add_bytes=(ranks * payload_bytes,))


def two_phase(rows: int, columns: int, wire: int, ranks: int) -> Exchange:
    """Reduce-scatter and all-gather of [rows, columns] f32 with `wire` bytes per element."""
    share = rows * columns // ranks
    return Exchange(message_bytes=(share * wire, share * wire), add_bytes=(ranks * share * F32, 0))


def gather(shard_bytes: int) -> Exchange:
    """Everybody sends its shard to everybody."""
    return Exchange(message_bytes=(shard_bytes,), add_bytes=(0,))


def in_rounds(payload_bytes: int, distances: tuple[int, ...]) -> Exchange:
    """All-reduce by exclusive or: in each round everything goes to one peer and is added."""
    return Exchange(
        message_bytes=(payload_bytes,) * len(distances),
        add_bytes=(2 * payload_bytes,) * len(distances),
        peers=tuple((one,) for one in distances),
    )


def program(kernel: StreamKernel, target: Target) -> MachineProgram:
    """The kernel for the simulator."""
    return MachineProgram(
        ranks=kernel.ranks,
        instructions=lambda rank: _instructions(kernel, target, rank),
        symmetric=True,
    )


def _instructions(kernel: StreamKernel, target: Target, rank: int) -> Iterator[Instruction]:
    rings = {name: _Ring(name, kernel) for name in kernel.slots}
    mark = Mark(phase="prologue")
    for ring in rings.values():
        for _ in range(ring.slots):
            yield from ring.refill(mark)
    if kernel.filled:
        held = sum(one.slots * max(one.sizes) for one in rings.values())
        fill_us = held / target.hbm.sustained_bytes_per_us + 2 * target.dma.latency_us
        yield Work(mark=mark, us=fill_us, engine=Engine.CONTROL)
    yield RoundStart(mark=mark)
    for number, layer in enumerate(kernel.layers):
        for place, one in enumerate(layer):
            mark = Mark(phase=f"s{place:02}", layer=number)
            if isinstance(one, Matrix):
                yield from _matmul(kernel, target, one, rings.get(one.ring), mark)
            elif kernel.ranks > 1:
                yield from exchange_instructions(one, kernel.ranks, rank, target, mark)


class _Ring:
    """The tiles of one ring in the order of use, and how many were started."""

    def __init__(self, name: str, kernel: StreamKernel) -> None:
        self.name, self.slots, self.started = name, kernel.slots[name], 0
        self.sizes = [
            kernel.stub_bytes or one.tile_bytes
            for layer in kernel.layers
            for one in layer
            if isinstance(one, Matrix) and one.ring == name
            for _ in range(one.tiles)
        ]

    def refill(self, mark: Mark) -> Iterator[Instruction]:
        """Starts the next tile, if there is one."""
        if self.started < len(self.sizes):
            yield Start(mark=mark, bytes=self.sizes[self.started], semaphore=self.name)
            self.started += 1


def _matmul(
    kernel: StreamKernel, target: Target, matrix: Matrix, ring: _Ring | None, mark: Mark
) -> Iterator[Instruction]:
    if matrix.vector_us:
        yield Work(mark=mark, us=matrix.vector_us, engine=Engine.VECTOR)
    push_us = matrix.push_scale * matrix.tile_bytes / BLOCK_BYTES * target.mxu.push_us
    size = kernel.stub_bytes or matrix.tile_bytes
    for first in range(0, matrix.tiles, kernel.group):
        count = min(kernel.group, matrix.tiles - first)
        if ring is not None:
            yield Wait(mark=mark, bytes=count * size, semaphore=ring.name, stall=Stall.TAPE)
        if kernel.dots:
            yield Work(mark=mark, us=count * push_us, engine=Engine.MATRIX)
        for index in range(first, first + count):
            if ring is not None:
                yield from ring.refill(mark)
            if index % kernel.tiles_per_step == kernel.tiles_per_step - 1:
                if kernel.stores_results:
                    yield Work(mark=mark, us=0.0, engine=Engine.VECTOR)
                yield Work(mark=mark, us=target.core.loop_control_us, engine=Engine.CONTROL)


def exchange_instructions(
    exchange: Exchange, ranks: int, rank: int, target: Target, mark: Mark
) -> Iterator[Instruction]:
    """An exchange, starting when the matrix unit has given its results."""
    yield Work(mark=mark, us=0.0, engine=Engine.VECTOR)
    for phase, size in enumerate(exchange.message_bytes):
        distances = exchange.peers[phase] if exchange.peers else tuple(range(ranks - 1, 0, -1))
        arrived, sent = f"arrived {phase}", f"sent {phase}"
        for distance in distances:
            peer = rank ^ distance
            yield Send(mark=mark, peer=peer, bytes=size, semaphore=arrived, sent=sent)
        total = len(distances) * size
        yield Wait(mark=mark, bytes=total, semaphore=arrived, stall=Stall.EXCHANGE)
        registers = exchange.add_bytes[phase] / REGISTER_BYTES
        add_us = registers / LOADS_PER_CYCLE / target.core.clock_mhz
        yield Work(mark=mark, us=add_us, engine=Engine.VECTOR)
        yield Wait(mark=mark, bytes=total, semaphore=sent, stall=Stall.EXCHANGE)
