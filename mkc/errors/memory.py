"""What does not fit: memory of a device, and VMEM of a core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import ClassVar

from mkc.errors.base import GIB
from mkc.errors.base import MIB
from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import sentence

LARGEST_LIVE = 12  # buffers that an error lists
LONGEST_OP = 60  # characters of what each of them is for


@dataclass(frozen=True, kw_only=True)
class LiveBuffer:
    """A buffer that is live where memory use peaks.

    Attributes:
      name: buffer name in the plan.
      op: the op that defines it, as the report names it.
      bytes: padded size.
    """

    name: str
    op: str
    bytes: int


class VmemError(MkcError):
    """The buffers that are live at once do not fit the target's VMEM."""

    code: ClassVar[str] = "E150"

    def __init__(
        self,
        *,
        needed_bytes: int,
        limit_bytes: int,
        live: Sequence[LiveBuffer],
        cheapest_change: str,
        at: Place | None = None,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.at = at
        self.cheapest_change = cheapest_change
        self.live = tuple(sorted(live, key=lambda one: (-one.bytes, one.name)))
        peak = f" at {at}" if at is not None else ""
        lines = "".join(
            f"\n  {one.bytes / MIB:8.2f} MiB  {one.name}  ({shorten(one.op, LONGEST_OP)})"
            for one in self.live[:LARGEST_LIVE]
        )
        if others := self.live[LARGEST_LIVE:]:
            size = sum(one.bytes for one in others) / MIB
            lines += f"\n  {size:8.2f} MiB  in {len(others)} smaller buffers"
        super().__init__(
            f"the kernel needs {needed_bytes / MIB:.2f} MiB of VMEM{peak}, the limit is "
            f"{limit_bytes / MIB:.2f} MiB: {(needed_bytes - limit_bytes) / MIB:.2f} MiB too much. "
            f"Cheapest change: {sentence(cheapest_change)}\nBuffers live at the peak:{lines}"
        )

    def advise(self, change: str) -> VmemError:
        """The same error with another advice, for a caller that has tried it."""
        return VmemError(
            needed_bytes=self.needed_bytes,
            limit_bytes=self.limit_bytes,
            live=self.live,
            cheapest_change=change,
            at=self.at,
        )


class HbmError(MkcError):
    """Weights and states do not fit the device memory of the chosen topology."""

    code: ClassVar[str] = "E151"

    def __init__(
        self,
        *,
        target: str,
        weight_bytes: int,
        state_bytes: int,
        limit_bytes: int,
        options: str = "",
    ) -> None:
        self.target = target
        self.weight_bytes = weight_bytes
        self.state_bytes = state_bytes
        self.limit_bytes = limit_bytes
        needed = weight_bytes + state_bytes
        advice = (
            f"Use {options}, with which they fit"
            if options
            else "No topology of this target holds them; use a smaller model or another target"
        )
        super().__init__(
            f"target '{target}': each device needs {needed / GIB:.2f} GiB of memory "
            f"({weight_bytes / GIB:.2f} GiB of weights, {state_bytes / GIB:.2f} GiB of states) and "
            f"has {limit_bytes / GIB:.2f} GiB: {(needed - limit_bytes) / GIB:.2f} GiB too much. "
            f"{sentence(advice)}"
        )

    def advise(self, options: str) -> HbmError:
        """The same error with options that work, for a caller that has tried them."""
        return HbmError(
            target=self.target,
            weight_bytes=self.weight_bytes,
            state_bytes=self.state_bytes,
            limit_bytes=self.limit_bytes,
            options=options,
        )


@dataclass(frozen=True, kw_only=True)
class HbmPart:
    """A part of a device's memory.

    Attributes:
      origin: how its size is known.
    """

    name: str
    bytes: int
    origin: str


class HbmPlanError(MkcError):
    """What serving a model takes does not fit the memory of a device."""

    code: ClassVar[str] = "E152"

    def __init__(self, *, target: str, limit_bytes: int, parts: Sequence[HbmPart]) -> None:
        needed = sum(one.bytes for one in parts)
        lines = "".join(
            f"\n  {one.bytes / GIB:8.2f} GiB  {one.name}  ({one.origin})"
            for one in sorted(parts, key=lambda one: -one.bytes)
            if one.bytes
        )
        super().__init__(
            f"target '{target}': serving the model takes {needed / GIB:.2f} GiB of each device's "
            f"memory, and it has {limit_bytes / GIB:.2f} GiB: "
            f"{(needed - limit_bytes) / GIB:.2f} GiB too much. Lower --context or the number of "
            f"sequences, or choose a target with more devices. It would hold:{lines}"
        )


# Output and the TPU compiler.
