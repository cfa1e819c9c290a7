"""What one rank's memory holds and what is under way, event by event.

Every check is made for the worst timing: a copy may read its source and write its target at any
moment between its start and the wait that covers it, and a semaphore on which several copies count
says something only when all of them have been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import Semaphores
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Index
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write

type Report = Callable[[str, str, str], None]
"""Called with code, phase and message."""

type Copy = Start | Send

LEAVING, ARRIVING = "copies that this rank starts", "messages of other ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a part of a block holds.

    Attributes:
      first, count: the part.
      data: what it is; units correspond one to one. None when it is nothing any reader may expect.
      changed: it differs from what HBM has under that name.
      unsaved: it must still be copied out.
      stale: HBM has been overwritten since.
    """

    first: int
    count: int
    data: Place | None
    changed: bool = False
    unsaved: bool = False
    stale: bool = False

    @property
    def end(self) -> int:
        return self.first + self.count

    def cut(self, first: int, end: int) -> Held:
        """The part between `first` and `end`, which lie inside."""
        if first == self.first and end == self.end:
            return self
        data = self.data
        if data is not None:
            data = replace(data, first=data.first + first - self.first, count=end - first)
        return replace(self, first=first, count=end - first, data=data)

    def continues_in(self, other: Held) -> bool:
        """`other` stands behind this part and holds what comes next."""
        mine, theirs = self.data, other.data
        return (
            self.end == other.first
            and mine is not None
            and theirs is not None
            and mine.array == theirs.array
            and mine.index == theirs.index
            and mine.first + mine.count == theirs.first
            and (self.changed, self.unsaved, self.stale)
            == (other.changed, other.unsaved, other.stale)
        )

    def joined(self, other: Held) -> Held:
        assert self.data is not None
        count = self.count + other.count
        return replace(self, count=count, data=replace(self.data, count=count))

    def says(self, place: Place, data: Place) -> bool:
        """This part of `place` is what `data` says."""
        mine = self.data
        return (
            mine is not None
            and mine.array == data.array
            and mine.index == data.index
            and mine.first - self.first == data.first - place.first
        )


@dataclass(kw_only=True)
class Memory:
    """Attributes:
    elsewhere: arrays that other ranks write; `ranks` looks at them.
    touched: arrays and semaphores with something else since somebody emptied this set.
    """

    arrays: Mapping[str, Array]
    semaphores: Mapping[str, Semaphores]
    elsewhere: frozenset[str]
    report: Report
    held: dict[str, dict[Index, list[Held]]] = field(default_factory=dict)
    holders: dict[str, set[str]] = field(default_factory=dict)  # array -> where it may be held
    flying: dict[str, list[Copy]] = field(default_factory=dict)  # by array, sources and targets
    started: dict[Semaphore, list[Copy]] = field(default_factory=dict)
    expected: dict[Semaphore, int] = field(default_factory=dict)  # bytes of these copies
    counted: dict[Semaphore, int] = field(default_factory=dict)  # bytes waited for so far
    uses: dict[Semaphore, str] = field(default_factory=dict)  # what each semaphore counts
    touched: set[str | Semaphore] = field(default_factory=set)

    def event(self, event: Event) -> None:
        match event:
            case Read():
                self.read(event)
            case Write():
                self.write(event)
            case Start():
                self.start(event)
            case Send():
                self.send(event)
            case Receive():
                self.known(event.semaphore, event.phase)
                self.use(event.semaphore, ARRIVING, event.phase)
            case Wait():
                self.wait(event)

    # accesses

    def read(self, event: Read) -> None:
        place = event.place
        if place.array in self.elsewhere or not self.inside(place, event.phase):
            return
        for copy in self.flying.get(place.array, ()):
            if copy.target.overlaps(place):
                self.report(
                    "V201", event.phase, f"{place} is read while {copy.source} is copied into it"
                )
                return
        if event.data is not None:
            self.expect(event, event.data)

    def expect(self, event: Read, data: Place) -> None:
        place, at = event.place, event.place.first
        for one in self.parts(place):
            if one.first > at:
                break
            if one.stale:
                message = f"{place} holds {one.data}, which has been changed in HBM since"
                self.report("V204", event.phase, message)
                return
            if not one.says(place, data):
                message = (
                    f"{place} should hold {data} but holds {one.data} in {one.first}:{one.end}"
                )
                self.report("V202", event.phase, message)
                return
            at = one.end
        if at < place.first + place.count:
            self.report("V203", event.phase, f"{place} is read, unit {at} was never written")

    def write(self, event: Write) -> None:
        place = event.place
        if place.array in self.elsewhere or not self.inside(place, event.phase):
            return
        for copy in self.flying.get(place.array, ()):
            if copy.target.overlaps(place) or copy.source.overlaps(place):
                what = f"the copy from {copy.source} to {copy.target} uses it"
                self.report("V301", event.phase, f"{place} is written while {what}")
                return
        if event.data is None:
            self.change(place, unsaved=event.saved)
        else:
            changed = not event.same
            self.put(place, event.data, event.phase, changed=changed, unsaved=event.saved)

    def change(self, place: Place, *, unsaved: bool) -> None:
        """Marks what the place holds as changed."""
        for one in self.taken(place):
            self.add(place, replace(one, changed=True, unsaved=one.unsaved or unsaved))

    def put(
        self, place: Place, data: Place | None, phase: str, *, changed: bool, unsaved: bool
    ) -> None:
        for one in self.taken(place):
            if one.unsaved and one.data != data:
                what = f"{one.data}, which was changed and not copied out,"
                self.report("V303", phase, f"{what} is overwritten in {place}")
        self.add(
            place,
            Held(first=place.first, count=place.count, data=data, changed=changed, unsaved=unsaved),
        )

    def parts(self, place: Place) -> Iterator[Held]:
        """What the place holds, in order, cut to its borders."""
        for one in self.held.get(place.array, {}).get(place.index, ()):
            first, end = max(one.first, place.first), min(one.end, place.first + place.count)
            if first < end:
                yield one.cut(first, end)

    def taken(self, place: Place) -> list[Held]:
        """As `parts`; they are removed."""
        self.touched.add(place.array)
        block = self.held.setdefault(place.array, {}).setdefault(place.index, [])
        end = place.first + place.count
        if len(block) == 1 and block[0].first == place.first and block[0].end == end:
            self.held[place.array][place.index] = []
            return block
        inside, kept = [], []
        for one in block:
            if one.end <= place.first or end <= one.first:
                kept.append(one)
                continue
            if one.first < place.first:
                kept.append(one.cut(one.first, place.first))
            inside.append(one.cut(max(one.first, place.first), min(one.end, end)))
            if end < one.end:
                kept.append(one.cut(end, one.end))
        self.held[place.array][place.index] = kept
        return inside

    def add(self, place: Place, held: Held) -> None:
        """Puts `held` where nothing is; neighbours that continue each other become one."""
        if held.data is not None:
            self.holders.setdefault(held.data.array, set()).add(place.array)
        block = self.held[place.array][place.index]
        at = next(
            (number for number, one in enumerate(block) if one.first > held.first), len(block)
        )
        if at < len(block) and held.continues_in(block[at]):
            held = held.joined(block.pop(at))
        if at > 0 and block[at - 1].continues_in(held):
            at -= 1
            held = block.pop(at).joined(held)
        block.insert(at, held)

    # copies

    def start(self, event: Start) -> None:
        source, target = event.source, event.target
        sound = self.inside(source, event.phase) and self.inside(target, event.phase)
        if not (self.known(event.semaphore, event.phase) and sound):
            return
        moved, room = self.size(source), self.size(target)
        if moved != room:
            message = f"{moved} bytes of {source} are copied to {room} bytes of {target}"
            self.report("V104", event.phase, message)
        self.collisions(event)
        if not self.arrays[target.array].on_chip:
            self.leave(event)
        self.fly(event, (source, target))

    def send(self, event: Send) -> None:
        """The sender's side: the source must not change until the send has been waited for."""
        sound = self.inside(event.source, event.phase)
        if not (self.known(event.semaphore, event.phase) and sound):
            return
        self.fly(event, (event.source,))
        self.use(event.received, ARRIVING, event.phase)  # all ranks name theirs alike

    def use(self, semaphore: Semaphore, what: str, phase: str) -> None:
        """A semaphore counts copies of this rank or messages of others: a wait cannot tell them."""
        before = self.uses.setdefault(semaphore, what)
        if before != what:
            name = semaphore_name(semaphore)
            self.report("V603", phase, f"{name} counts {what}, and elsewhere {before}")

    def fly(self, copy: Copy, places: tuple[Place, ...]) -> None:
        self.use(copy.semaphore, LEAVING, copy.phase)
        for array in {place.array for place in places}:
            self.touched.add(array)
            self.flying.setdefault(array, []).append(copy)
        self.started.setdefault(copy.semaphore, []).append(copy)
        before = self.expected.get(copy.semaphore, 0)
        self.expected[copy.semaphore] = before + self.counts(copy)
        self.touched.add(copy.semaphore)

    def collisions(self, event: Start) -> None:
        source, target = event.source, event.target
        for copy in self.flying.get(source.array, ()):
            if copy.target.overlaps(source):
                chip = self.arrays[source.array].on_chip
                message = f"{source} is copied while {copy.source} is still copied into it"
                self.report("V302" if chip else "V401", event.phase, message)
        for copy in self.flying.get(target.array, ()):
            if copy.target.overlaps(target) or copy.source.overlaps(target):
                chip = self.arrays[target.array].on_chip
                what = f"the copy from {copy.source} to {copy.target} is under way"
                message = f"{source} is copied to {target} while {what}"
                self.report("V302" if chip else "V402", event.phase, message)
        for one in self.parts(target) if self.arrays[target.array].on_chip else ():
            if one.unsaved:
                message = f"{one.data} was changed in {target} and is overwritten by {source}"
                self.report("V303", event.phase, message)

    def leave(self, event: Start) -> None:
        """A copy out of VMEM: to an operand it must bring back what was fetched from there."""
        source, target = event.source, event.target
        if not self.arrays[target.array].writable:
            self.report("V404", event.phase, f"{target} is written, but is no updated operand")
        if self.arrays[target.array].saved:
            for one in self.parts(source):
                if not one.says(source, target):
                    message = f"{source} holds {one.data} and is copied to {target}"
                    self.report("V403", event.phase, message)
        for one in self.taken(source):
            self.add(source, replace(one, unsaved=False))
        self.outdate(self.changes(source, target))

    def changes(self, source: Place, target: Place) -> Place:
        """The part of the target behind what comes back as it was fetched."""
        same = 0
        for one in self.parts(source):
            if one.changed or one.first > source.first + same:
                break
            same = one.end - source.first
        if source.count != target.count or same == 0:
            return target
        return replace(target, first=target.first + same, count=target.count - same)

    def outdate(self, target: Place) -> None:
        """Unchanged copies of what is overwritten in HBM are not worth reading any more."""

        def old(one: Held) -> bool:
            return one.data is not None and one.data.overlaps(target) and not one.changed

        for name in self.holders.get(target.array, ()):
            for index, block in self.held[name].items():
                if any(map(old, block)):
                    self.touched.add(name)
                    self.held[name][index] = [
                        part
                        for one in block
                        for part in (_outdated(one, target) if old(one) else (one,))
                    ]

    def wait(self, event: Wait) -> None:
        if not self.known(event.semaphore, event.phase):
            return
        copies = self.started.get(event.semaphore, [])
        name = semaphore_name(event.semaphore)
        if not copies:
            message = f"{event.routine} waits at {name}, and no copy has been started for it"
            self.report("V102", event.phase, message)
            return
        if all(self.counts(copy) != event.size for copy in copies):
            sizes = sorted({self.counts(copy) for copy in copies})
            message = f"{event.routine} waits at {name} for {event.size} bytes of a copy of "
            self.report("V103", event.phase, message + ", ".join(map(str, sizes)))
            self.land(event.semaphore, copies)
            return
        self.touched.add(event.semaphore)
        counted = self.counted.get(event.semaphore, 0) + event.size
        if counted >= self.expected[event.semaphore]:
            self.land(event.semaphore, copies)
        else:
            self.counted[event.semaphore] = counted

    def counts(self, copy: Copy) -> int:
        """Bytes that the semaphore of a copy counts on this rank."""
        return self.size(copy.source if isinstance(copy, Send) else copy.target)

    def land(self, semaphore: Semaphore, copies: list[Copy]) -> None:
        for copy in copies:
            for array in {copy.source.array, copy.target.array}:
                self.touched.add(array)
                flying = self.flying.get(array, [])
                flying[:] = [one for one in flying if one is not copy]
        for copy in copies:
            if isinstance(copy, Start) and self.arrays[copy.target.array].on_chip:
                self.put(copy.target, copy.source, copy.phase, changed=False, unsaved=False)
        self.started.pop(semaphore, None)
        self.expected.pop(semaphore, None)
        self.counted.pop(semaphore, None)

    def copy(self) -> Memory:
        """The same, which changes by itself; what semaphores count is shared."""
        held = {
            name: {index: list(block) for index, block in blocks.items()}
            for name, blocks in self.held.items()
        }
        return replace(
            self,
            held=held,
            holders={name: set(found) for name, found in self.holders.items()},
            flying={name: list(found) for name, found in self.flying.items() if found},
            started={name: list(found) for name, found in self.started.items()},
            expected=dict(self.expected),
            counted=dict(self.counted),
            touched=set(self.touched),
        )

    # limits and the end

    def size(self, place: Place) -> int:
        return place.count * self.arrays[place.array].unit_bytes

    def inside(self, place: Place, phase: str) -> bool:
        array = self.arrays.get(place.array)
        if array is None:
            self.report("V805", phase, f"there is no array {place.array}")
            return False
        if not array.has(place):
            limits = f"{list(array.blocks)} blocks of {array.units}"
            self.report("V105", phase, f"{place} lies outside of {array.name}, {limits}")
            return False
        return True

    def known(self, semaphore: Semaphore, phase: str) -> bool:
        name, index = semaphore
        found = self.semaphores.get(name)
        sound = found is not None and all(
            0 <= one < size for one, size in zip(index, found.shape, strict=True)
        )
        if not sound:
            self.report("V105", phase, f"there is no semaphore {semaphore_name(semaphore)}")
        return sound

    def end(self) -> None:
        """The kernel ends."""
        for semaphore, copies in self.started.items():
            copy = copies[0]
            message = (
                f"the copy from {copy.source} to {copy.target} is not waited for; "
                f"{semaphore_name(semaphore)} is not zero at the end"
            )
            self.report("V101", copy.phase, message)
        for name, blocks in self.held.items():
            for index, block in blocks.items():
                for one in block:
                    if one.unsaved:
                        place = Place(array=name, index=index, first=one.first, count=one.count)
                        message = f"{one.data} was changed in {place} and never copied out"
                        self.report("V303", "end", message)


def _outdated(held: Held, target: Place) -> Iterator[Held]:
    """Cut in three: what lies before and behind `target` stays as it is."""
    assert held.data is not None
    shift = held.first - held.data.first
    first = max(held.first, target.first + shift)
    end = min(held.end, target.first + target.count + shift)
    if held.first < first:
        yield held.cut(held.first, first)
    yield replace(held.cut(first, end), stale=True)
    if end < held.end:
        yield held.cut(end, held.end)


def semaphore_name(semaphore: Semaphore) -> str:
    name, index = semaphore
    return name + "".join(f"[{one}]" for one in index)
