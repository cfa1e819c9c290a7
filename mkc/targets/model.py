"""What a target says about its hardware. All numbers are for one device, units are in the names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp
from math import prod


class OriginKind(StrEnum):
    """How a number came to be known."""

    PUBLISHED = "published"
    COMPILED = "ahead-of-time compile"
    CHIP_TABLE = "jax chip table"
    DERIVED = "derived"
    ASSUMED = "assumed"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where one number comes from.

    Attributes:
      kind: how it is known.
      note: source or reasoning; may be empty.
      measured: True when mkc measured it on hardware.
    """

    kind: OriginKind
    note: str
    measured: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.note}" if self.note else str(self.kind)


@dataclass(frozen=True, kw_only=True)
class Core:
    """The vector unit and the instruction stream.

    Attributes:
      clock_mhz: instruction bundles per us.
      lanes, sublanes: elements of a 32-bit vector register, [sublanes, lanes].
      vector_registers: how many there are.
      multiply_adds_per_cycle, transcendentals_per_cycle: vector registers per cycle.
      loop_step_us: fixed cost of one step of a run-time loop.
      loop_control_us: the part of it that is no drain of the matrix units.
      vector_chain_us: a chain of dependent vector operations with one sum over lanes.
    """

    clock_mhz: int
    lanes: int
    sublanes: int
    vector_registers: int
    multiply_adds_per_cycle: float
    transcendentals_per_cycle: float
    loop_step_us: float
    loop_control_us: float
    vector_chain_us: float


@dataclass(frozen=True, kw_only=True)
class Vmem:
    """Vector memory.

    Attributes:
      total_bytes: what the chip has.
      usable_bytes: what the compiler lets one kernel allocate, its own scratch included.
      reserve_bytes: part of `usable_bytes` to leave to the compiler's spills.
    """

    total_bytes: int
    usable_bytes: int
    reserve_bytes: int

    @property
    def limit_bytes(self) -> int:
        """What a plan may allocate explicitly."""
        return self.usable_bytes - self.reserve_bytes


@dataclass(frozen=True, kw_only=True)
class Smem:
    """Scalar memory; `usable_bytes` is the largest explicit allocation."""

    total_bytes: int
    usable_bytes: int


@dataclass(frozen=True, kw_only=True)
class Semaphores:
    """Semaphores of one kernel, of copies and others; a barrier is not counted."""

    usable_count: int


@dataclass(frozen=True, kw_only=True)
class Hbm:
    """Device memory.

    Attributes:
      total_bytes: what the data sheet says.
      usable_bytes: what a program may use.
      peak_bytes_per_us: data sheet rate.
      sustained_bytes_per_us: what a saturated ring reaches in ordinary kernels.
      best_bytes_per_us: what the best kernels reach.
    """

    total_bytes: int
    usable_bytes: int
    peak_bytes_per_us: int
    sustained_bytes_per_us: int
    best_bytes_per_us: int


@dataclass(frozen=True, kw_only=True)
class Dma:
    """Copies between HBM and VMEM.

    Attributes:
      law_asymptote_bytes_per_us, law_scale_bytes: see `Target.stream_bytes_per_us`.
      saturation_bytes_in_flight: a ring that keeps this many bytes in flight streams at full rate.
      load_target_bytes: size to aim at for one load.
      minimum_load_bytes: smaller loads lose bandwidth.
      minimum_row_bytes: narrower rows lose bandwidth.
      latency_us: from the start of a copy to its landing on an idle queue.
      issue_us: instruction time to start a copy.
      wait_us: instruction time lost around a wait.
    """

    law_asymptote_bytes_per_us: int
    law_scale_bytes: int
    saturation_bytes_in_flight: int
    load_target_bytes: int
    minimum_load_bytes: int
    minimum_row_bytes: int
    latency_us: float
    issue_us: float
    wait_us: float


@dataclass(frozen=True, kw_only=True)
class Mxu:
    """The matrix units.

    Attributes:
      width: rows and columns of one unit.
      units: how many one core has.
      free_rows: activation rows up to which a matmul costs the same.
      push_us: time to push one bf16 block of 256 x 256 weights over all units.
      drain_us: from the last push to the results.
      bf16_flops_per_us: peak.
    """

    width: int
    units: int
    free_rows: int
    push_us: float
    drain_us: float
    bf16_flops_per_us: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Messages in which every device sends to all its peers.

    Attributes:
      latency_us: time of an exchange of few bytes, the sum of what arrives included.
      messages: of one device, in the exchanges that the latency was fitted to; each further one
        costs `links.issue_us`.
      egress_bytes_per_us: rate of the bytes that one device sends to all peers together.
      barrier_us: time of a barrier over all devices.
      drain_us: wait for the matrix units before a send that depends on a matmul.
    """

    latency_us: float
    messages: int
    egress_bytes_per_us: int
    barrier_us: float
    drain_us: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """One message between two ranks: latency + bytes / rate, by how far they are.

    Attributes:
      cores_per_chip, devices_per_host: neighbours in the numbering of ranks.
      issue_us: instruction time to start a message.
      sibling_latency_us, sibling_bytes_per_us: to the other core of the chip.
      chip_latency_us, chip_bytes_per_us: to another chip of the host.
      host_latency_us, host_bytes_per_us: to another host.
    """

    cores_per_chip: int
    devices_per_host: int
    issue_us: float
    sibling_latency_us: float
    sibling_bytes_per_us: int
    chip_latency_us: float
    chip_bytes_per_us: int
    host_latency_us: float
    host_bytes_per_us: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Costs of one kernel launch.

    Attributes:
      dispatch_us: host time per launch over several devices.
      fixed_us: device time per launch that no byte explains.
      prologue_us: time until the ring is full.
    """

    dispatch_us: float
    fixed_us: float
    prologue_us: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices that are wired together, under the name that the TPU compiler accepts."""

    generation: str
    name: str
    devices: int

    @property
    def full_name(self) -> str:
        """Such as `gen:2x2x1`."""
        return f"{self.generation}:{self.name}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One generation, and a topology of it when one was named.

    Attributes:
      generation: name of the data file.
      device_kind: what JAX calls the device.
      summary: one line for people.
      topologies: known ones, fewest devices first.
      topology: the one asked for; None when only the generation was.
      tile_rows: rows of a VMEM tile by bytes per element; its columns are `core.lanes`.
      origins: origin of every number, by its dotted name such as `vmem.usable_bytes`.
    """

    generation: str
    device_kind: str
    summary: str
    topologies: tuple[Topology, ...]
    topology: Topology | None
    core: Core
    vmem: Vmem
    smem: Smem
    semaphores: Semaphores
    hbm: Hbm
    dma: Dma
    mxu: Mxu
    exchange: Exchange
    links: Links
    launch: Launch
    tile_rows: dict[int, int]
    origins: dict[str, Origin]

    @property
    def name(self) -> str:
        return self.topology.full_name if self.topology else self.generation

    def smallest_topology(self, total_bytes: int) -> Topology | None:
        """The topology with the fewest devices whose usable HBM holds `total_bytes` together."""
        for topology in self.topologies:
            if topology.devices * self.hbm.usable_bytes >= total_bytes:
                return topology
        return None

    def padded_bytes(self, shape: Sequence[int], element_bytes: int) -> int:
        """VMEM bytes of an array: its two minor dimensions are padded to whole tiles."""
        assert element_bytes in self.tile_rows, f"no VMEM tile for {element_bytes}-byte elements"
        *major, rows, columns = (1, 1, *shape)
        padded_rows = _round_up(rows, self.tile_rows[element_bytes])
        padded_columns = _round_up(columns, self.core.lanes)
        return prod(major) * padded_rows * padded_columns * element_bytes

    def stream_bytes_per_us(self, bytes_in_flight: float) -> float:
        """HBM read rate of a ring that keeps `bytes_in_flight` in flight."""
        law = self.dma.law_asymptote_bytes_per_us * (
            1.0 - exp(-bytes_in_flight / self.dma.law_scale_bytes)
        )
        return min(float(self.hbm.sustained_bytes_per_us), law)

    def exchange_us(self, message_bytes: int, peers: int) -> float:
        """Time of an exchange in which each device sends a message to each of so many peers."""
        further = max(0, peers - self.exchange.messages)
        egress_us = peers * message_bytes / self.exchange.egress_bytes_per_us
        return self.exchange.latency_us + further * self.links.issue_us + egress_us


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
