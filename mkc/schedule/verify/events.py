"""What a kernel does, one event after the other, as far as order and memory are concerned.

A rank executes its events in order. A copy runs on its own from its start until the wait that
covers it. Arithmetic is left out: a `Read` or a `Write` says which part of which array the vector
unit touches, and what it expects to find there.
"""

from __future__ import annotations

from dataclasses import dataclass

type Index = tuple[int, ...]
type Semaphore = tuple[str, Index]
"""Name of a semaphore array in the kernel, and the index of one semaphore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Units `first` .. `first + count` of one block of an array.

    Attributes:
      array: its name in the kernel, or the name of a value when it says what a place holds.
      index: which block: the slot of a ring, the item of a stream, the rank of a receive buffer.
      first, count: rows of a tape, a table, a ring slot or a cache, lanes of an activation region;
        arrays that are only moved whole have one unit.
    """

    array: str
    index: Index = ()
    first: int = 0
    count: int = 1

    def overlaps(self, other: Place) -> bool:
        return (
            self.index == other.index
            and self.array == other.array
            and self.first < other.first + other.count
            and other.first < self.first + self.count
        )

    def moved(self, amount: int, modulo: int | None = None) -> Place:
        """The same place `amount` items further on: along the index, or along the rows."""
        if self.index:
            head = self.index[0] + amount
            index = (head if modulo is None else head % modulo, *self.index[1:])
            return Place(array=self.array, index=index, first=self.first, count=self.count)
        first = self.first + amount
        first = first if modulo is None else first % modulo
        return Place(array=self.array, first=first, count=self.count)

    def __str__(self) -> str:
        index = "".join(f"[{one}]" for one in self.index)
        part = (
            f", {self.first} to {self.first + self.count}" if self.first or self.count > 1 else ""
        )
        return f"{self.array}{index}{part}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events.

    Attributes:
      phase: id of the phase, or the part of the kernel around the phases.
      routine: what emitted it: the support function, or the kind of the phase.
    """

    phase: str
    routine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(Event):
    """Starts a copy inside one device; `semaphore` counts its bytes when it has landed."""

    source: Place
    target: Place
    semaphore: Semaphore


@dataclass(frozen=True, kw_only=True, slots=True)
class Send(Event):
    """Starts a copy to another rank; `received` is the receiver's semaphore."""

    source: Place
    target: Place
    semaphore: Semaphore
    received: Semaphore
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait(Event):
    """Waits until a semaphore has counted `size` bytes, and takes them off it."""

    semaphore: Semaphore
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Receive(Wait):
    """A wait for what other ranks send."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Read(Event):
    """The vector unit reads; `data` is what it expects there, None for whatever there is.

    Attributes:
      sender: rank whose message it expects in a receive buffer; None for the rank that the block
        has the number of.
    """

    place: Place
    data: Place | None
    sender: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Write(Event):
    """The vector unit writes.

    Attributes:
      data: what the place holds afterwards; None for a change of what it holds already.
      saved: it must be copied out before something else takes the place.
      same: what is written is what HBM holds under that name.
    """

    place: Place
    data: Place | None
    saved: bool = False
    same: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest(Write):
    """Nothing is written, because all sequences rest: whatever the place holds stands for `data`,
    since rows of sequences that rest mean nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal(Event):
    """Adds one to the barrier semaphore of another rank."""

    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet(Event):
    """Waits for `count` signals at this rank's barrier semaphore."""

    count: int
