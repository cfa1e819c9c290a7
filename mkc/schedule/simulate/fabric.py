"""Where messages travel: the class of the link between two ranks and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mkc.targets import Target


class Hop(StrEnum):
    """How far a peer is."""

    SIBLING = "sibling"  # the other core of the chip
    CHIP = "chip"  # another chip of the host
    HOST = "host"  # another host


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Time of a message: `latency_us` + bytes / `bytes_per_us`."""

    latency_us: float
    bytes_per_us: float


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """Links of a topology. Ranks are numbered so that cores of a chip, chips of a host adjoin.

    Attributes:
      egress_bytes_per_us: what one rank sends to other chips together.
    """

    cores_per_chip: int
    devices_per_host: int
    egress_bytes_per_us: float
    links: dict[Hop, Link]

    def hop(self, rank: int, peer: int) -> Hop:
        """Class of the link between two ranks."""
        if rank // self.cores_per_chip == peer // self.cores_per_chip:
            return Hop.SIBLING
        same_host = rank // self.devices_per_host == peer // self.devices_per_host
        return Hop.CHIP if same_host else Hop.HOST


def fabric_of(target: Target) -> Fabric:
    """The fabric that a target describes."""
    links = target.links
    return Fabric(
        cores_per_chip=links.cores_per_chip,
        devices_per_host=links.devices_per_host,
        egress_bytes_per_us=target.exchange.egress_bytes_per_us,
        links={
            Hop.SIBLING: Link(
                latency_us=links.sibling_latency_us, bytes_per_us=links.sibling_bytes_per_us
            ),
            Hop.CHIP: Link(latency_us=links.chip_latency_us, bytes_per_us=links.chip_bytes_per_us),
            Hop.HOST: Link(latency_us=links.host_latency_us, bytes_per_us=links.host_bytes_per_us),
        },
    )
