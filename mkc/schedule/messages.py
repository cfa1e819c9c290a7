"""Who sends how much to whom in an exchange, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from mkc.schedule.exchange_plan import ExchangePlan
from mkc.targets import Target


@dataclass(frozen=True, kw_only=True)
class Messages:
    """One phase: everyone sends a message to each of the others.

    Attributes:
      members: ranks that exchange with one another, each rank included.
      stride: how far apart they are.
      bytes: of one message.
    """

    members: int
    stride: int
    bytes: int

    @property
    def peers(self) -> int:
        return self.members - 1

    def others(self, rank: int) -> list[int]:
        """The peers of a rank in the order of sending.

        With a power of two by exclusive or: at every moment each rank sends to one and receives
        from one, and the nearest comes last.
        """
        place = rank // self.stride % self.members
        first = rank - place * self.stride
        distances = range(self.members - 1, 0, -1)
        if self.members & (self.members - 1) == 0:
            places = [place ^ distance for distance in distances]
        else:
            places = [(place + distance) % self.members for distance in distances]
        return [first + one * self.stride for one in places]


def messages(plan: ExchangePlan, ranks: int) -> tuple[Messages, ...]:
    """The phases of an exchange; each begins when what the one before brought was read."""
    members = plan.group or ranks
    everybody = Messages(members=members, stride=1, bytes=plan.rows * plan.columns * 4)
    share = plan.rows * plan.columns // (plan.group or ranks)
    match plan.kind:
        case "two_phase":
            return (
                Messages(members=ranks, stride=1, bytes=share * plan.wire.bytes),
                Messages(members=ranks, stride=1, bytes=share * 2),
            )
        case "two_level":
            group, wire, result = plan.group, plan.wire.bytes, 2 if plan.rounds else 4
            return (
                Messages(members=group, stride=1, bytes=share * wire),
                Messages(members=ranks // group, stride=group, bytes=share * wire),
                Messages(members=group, stride=1, bytes=plan.rows * plan.gathered * result),
            )
        case "two_step":
            rows, lanes = plan.dense
            size = rows * lanes * plan.wire.bytes
            return (
                Messages(members=plan.group, stride=1, bytes=size),
                Messages(members=ranks // plan.group, stride=plan.group, bytes=size),
            )
        case "gather":
            return (replace(everybody, bytes=everybody.bytes // 2),)
        case _:
            return (everybody,)


def exchange_us(plan: ExchangePlan, ranks: int, target: Target) -> float:
    """Predicted time by the law that the target's figures were fitted to, sums included."""
    return sum(target.exchange_us(one.bytes, one.peers) for one in messages(plan, ranks))


def summed_elements(plan: ExchangePlan, ranks: int) -> int:
    """What a rank reads of its receive buffers."""
    if plan.kind == "two_step":
        rows, lanes = plan.dense
        return sum(one.members * rows * lanes for one in messages(plan, ranks))
    if plan.kind == "two_level":
        share = plan.columns // plan.group
        widths = (share, share, plan.gathered)
        parts = zip(messages(plan, ranks), widths, strict=True)
        return sum(one.members * plan.rows * width for one, width in parts)
    return sum(one.members * plan.rows * _columns(plan, ranks) for one in messages(plan, ranks))


def _columns(plan: ExchangePlan, ranks: int) -> int:
    return plan.columns // ranks if plan.kind == "two_phase" else plan.columns
