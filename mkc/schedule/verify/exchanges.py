"""What the exchanges of the generated kernel do, as events; part of `protocol`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import TYPE_CHECKING

from mkc.ir.types import DType
from mkc.schedule.exchange_plan import Part
from mkc.schedule.exchange_plan import scattered_columns
from mkc.schedule.messages import Messages
from mkc.schedule.messages import messages
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel

ARGMAX, GATHER = "sharded_argmax", "all_gather"


@dataclass(frozen=True, kw_only=True)
class Message:
    """A copy to a peer that has been started, for its two waits."""

    send: Send
    size: int


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of one rank.

    Attributes:
      begun: messages of an exchange whose first part was executed, by its buffers.
    """

    kernel: Kernel
    begun: dict[str, list[Message]] = field(default_factory=dict)

    def peers(self) -> list[int]:
        """All other ranks, in the order of sending."""
        everybody = Messages(members=self.kernel.program.ranks, stride=1, bytes=0)
        return everybody.others(self.kernel.rank)

    def barrier(self, routine: str) -> None:
        kernel = self.kernel
        if kernel.program.ranks == 1:
            return
        for peer in self.peers():
            kernel.sink.event(Signal(phase=kernel.at, routine=routine, peer=peer))
        kernel.sink.event(Meet(phase=kernel.at, routine=routine, count=kernel.program.ranks - 1))

    def send(
        self, source: Place, target: Place, semaphores: tuple[Semaphore, Semaphore], peer: int
    ) -> Message:
        """Semaphores: what the sender counts, what the receiver counts."""
        kernel = self.kernel
        semaphore, received = semaphores
        send = Send(
            phase=kernel.at,
            routine="send",
            source=source,
            target=target,
            semaphore=semaphore,
            received=received,
            peer=peer,
        )
        kernel.sink.event(send)
        return Message(send=send, size=kernel.size(target))

    def wait_received(self, messages: list[Message]) -> None:
        for one in messages:
            self.kernel.sink.event(
                Receive(
                    phase=self.kernel.at,
                    routine="wait_recv",
                    semaphore=one.send.received,
                    size=one.size,
                )
            )

    def wait_sent(self, messages: list[Message]) -> None:
        for one in messages:
            self.kernel.wait("wait_send", one.send.semaphore, self.kernel.size(one.send.source))

    def one_shot(self, name: str, routine: str, part: Part = Part.WHOLE) -> None:
        """Everybody sends its `send` buffer to everybody, of its group where there are groups.

        A sum has its own still as a value; others copy their block from there.
        """
        kernel = self.kernel
        plan = next(one for one in kernel.program.exchanges if one.name == name)
        (level,) = messages(plan, kernel.program.ranks)
        me = kernel.rank % level.members
        send, receive = Place(array=f"{name}_send"), f"{name}_receive"
        semaphores = ((f"{name}_sems", (0,)), (f"{name}_sems", (1,)))
        if part is not Part.FINISH:
            kernel.write(routine, send, send)
            mine = Place(array=receive, index=(me,))
            self.begun[name] = [
                self.send(send, mine, semaphores, peer) for peer in level.others(kernel.rank)
            ]
            if routine in (ARGMAX, GATHER):
                kernel.read(routine, send, send)
            kernel.write(routine, mine, send)
        if part is Part.START:
            return
        sent = self.begun.pop(name)
        self.wait_received(sent)
        self._read_parts(routine, receive, level, send)
        self.wait_sent(sent)

    def read_all(self, routine: str, receive: str, sent: Place) -> None:
        """Reads what every rank has sent; `sent` is where it was at the sender."""
        for rank in range(self.kernel.program.ranks):
            self.kernel.read(routine, Place(array=receive, index=(rank,)), sent)

    def all_reduce(self, phase: AllReducePhase) -> None:
        kernel, part = self.kernel, phase.part
        routine = f"all_reduce_{phase.algorithm}"
        if phase.algorithm == "two_phase":
            self.two_phase(phase)
        else:
            if part is not Part.FINISH:
                kernel.load(routine, phase.partial)
            if phase.algorithm == "two_level":
                self.two_level(phase)
            elif phase.algorithm == "two_step":
                self.two_step(phase)
            elif kernel.program.ranks > 1:
                self.one_shot(phase.exchange, routine, part)
        if part is not Part.START:
            kernel.store("all_reduce", phase.output)
            self.meeting(phase.meets)

    def two_phase(self, phase: AllReducePhase) -> None:
        """Shares of the columns are scattered, summed, and the sums gathered."""
        kernel, name, routine = self.kernel, phase.exchange, "all_reduce_two_phase"
        ranks, me = kernel.program.ranks, kernel.rank
        if ranks == 1:
            kernel.load(routine, phase.partial)
            return
        plan = next(one for one in kernel.program.exchanges if one.name == name)
        share = scattered_columns(phase.partial.width, ranks) // ranks
        rounded = Place(array=f"{name}_parts") if plan.wire is not DType.F32 else None

        def part(rank: int) -> Place:
            if rounded is not None:
                return replace(rounded, first=rank * share, count=share)
            start = phase.partial.start + rank * share
            return kernel.lanes(View(buffer=phase.partial.buffer, start=start, width=share))

        mine = part(me)
        scattered = Place(array=f"{name}_scattered", index=(me,))
        if phase.part is not Part.FINISH:
            self._round_partials(phase, rounded, share * ranks)
            pair = self._pair(name, 0)
            self.begun[name] = [
                self.send(part(peer), scattered, pair, peer) for peer in self.peers()
            ]
            if rounded is not None:
                kernel.read(routine, mine, mine)
            else:
                kernel.load(routine, phase.partial)
            kernel.write(routine, scattered, mine)
        if phase.part is Part.START:
            return
        scatter = self.begun.pop(name)
        self.wait_received(scatter)
        self.read_all(routine, scattered.array, mine)
        send = Place(array=f"{name}_send")
        kernel.write(routine, send, send)
        gathered = Place(array=f"{name}_gathered", index=(me,))
        gather = [self.send(send, gathered, self._pair(name, 2), peer) for peer in self.peers()]
        kernel.read(routine, send, send)
        kernel.write(routine, gathered, send)
        self.wait_received(gather)
        self.read_all(routine, gathered.array, send)
        self.wait_sent([*scatter, *gather])

    def _round_partials(self, phase: AllReducePhase, rounded: Place | None, whole: int) -> None:
        """Lanes behind the partial sums are cleared; all are rounded where they travel so."""
        kernel, routine = self.kernel, "all_reduce_two_phase"
        behind = phase.partial.start + phase.partial.width
        padding = View(buffer=phase.partial.buffer, start=behind, width=whole - phase.partial.width)
        if padding.width:
            kernel.store(routine, padding)
        if rounded is not None:
            kernel.load(routine, phase.partial)
            everything = replace(rounded, first=0, count=whole)
            kernel.write(routine, everything, everything)

    def two_level(self, phase: AllReducePhase) -> None:
        """Shares are summed within groups, then between them; the sums go to the group."""
        kernel, name, routine = self.kernel, phase.exchange, "all_reduce_two_level"
        plan = next(one for one in kernel.program.exchanges if one.name == name)
        group = plan.group
        place, mine = kernel.rank % group, kernel.rank // group
        send, summed, total = (Place(array=f"{name}_{one}") for one in ("send", "summed", "total"))
        width, share = phase.partial.width, plan.columns // group
        inner, outer, _ = messages(plan, kernel.program.ranks)
        near, far = inner.others(kernel.rank), outer.others(kernel.rank)
        scattered = Place(array=f"{name}_scattered", index=(place,))

        def part(of: int) -> Place:
            return replace(send, first=of * share, count=share)

        if phase.part is not Part.FINISH:
            parts = [part(of) for of in range(group)]
            if not plan.scattered:
                spans = ((0, width), (width, plan.columns))
                parts = [replace(send, first=one, count=end - one) for one, end in spans]
            for one in parts:
                if one.count:
                    kernel.write(routine, one, one)
            pair = self._pair(name, 0)
            self.begun[name] = [
                self.send(part(peer % group), scattered, pair, peer) for peer in near
            ]
            kernel.read(routine, part(place), part(place))
            kernel.write(routine, scattered, part(place))
        if phase.part is Part.START:
            return
        scatter = self.begun.pop(name)
        self.wait_received(scatter)
        self._read_parts(routine, scattered.array, inner, part(place))
        kernel.write(routine, summed, summed)
        across = Place(array=f"{name}_across", index=(mine,))
        crossing = [self.send(summed, across, self._pair(name, 2), peer) for peer in far]
        kernel.read(routine, summed, summed)
        kernel.write(routine, across, summed)
        self.wait_received(crossing)
        self._read_parts(routine, across.array, outer, summed)
        if plan.scattered:
            total = replace(total, first=0, count=share)
        kernel.write(routine, total, total)
        gathered = Place(array=f"{name}_gathered", index=(place,))
        everybodys = replace(total, count=plan.gathered) if plan.scattered else total
        gather = [self.send(everybodys, gathered, self._pair(name, 4), peer) for peer in near]
        kernel.read(routine, everybodys, everybodys)
        kernel.write(routine, gathered, everybodys)
        self.wait_received(gather)
        self._read_parts(routine, gathered.array, inner, everybodys)
        self.wait_sent([*scatter, *crossing, *gather])
        if plan.scattered:
            own = replace(total, first=plan.gathered, count=plan.share)
            kernel.read(routine, own, own)

    def two_step(self, phase: AllReducePhase) -> None:
        """A row goes to everybody in the group, the sum of the group to its counterparts."""
        kernel, name, routine = self.kernel, phase.exchange, "all_reduce_two_step"
        plan = next(one for one in kernel.program.exchanges if one.name == name)
        group = plan.group
        inner, outer = messages(plan, kernel.program.ranks)
        staged, send, summed = (
            Place(array=f"{name}_{one}") for one in ("staged", "send", "summed")
        )
        place, mine = kernel.rank % group, kernel.rank // group
        receive, across = f"{name}_receive", f"{name}_across"

        def row(rank: int) -> Place:
            """What is sent to a rank of the group: the same to all, or each its own."""
            return replace(send, index=(rank % group,)) if plan.scattered else send

        if phase.part is not Part.FINISH:
            for other in range(group if plan.scattered else 1):
                kernel.write(routine, staged, staged)
                kernel.read(routine, staged, staged)
                kernel.write(routine, row(other), row(other))
            target = Place(array=receive, index=(place,))
            self.begun[name] = self._step(routine, row, target, inner, (name, 0))
        if phase.part is Part.START:
            return
        near = self.begun.pop(name)
        self.wait_received(near)
        self._read_parts(routine, receive, inner, row(kernel.rank))
        kernel.write(routine, summed, summed)
        target = Place(array=across, index=(mine,))
        far = self._step(routine, lambda _: summed, target, outer, (name, 2))
        self.wait_received(far)
        self._read_parts(routine, across, outer, summed)
        self.wait_sent([*near, *far])

    def _step(
        self,
        routine: str,
        row: Callable[[int], Place],
        target: Place,
        level: Messages,
        semaphores: tuple[str, int],
    ) -> list[Message]:
        """A row is sent to each of the others of a level; the own one is copied."""
        kernel, pair = self.kernel, self._pair(*semaphores)
        copies = [self.send(row(peer), target, pair, peer) for peer in level.others(kernel.rank)]
        mine = row(kernel.rank)
        kernel.read(routine, mine, mine)
        kernel.write(routine, target, mine)
        return copies

    def _pair(self, name: str, first: int) -> tuple[Semaphore, Semaphore]:
        """What the sender counts, what the receiver counts."""
        return (f"{name}_sems", (first,)), (f"{name}_sems", (first + 1,))

    def _read_parts(self, routine: str, array: str, level: Messages, sent: Place) -> None:
        """What each member of a level has sent, this rank's own part included."""
        members = sorted([self.kernel.rank, *level.others(self.kernel.rank)])
        for number, member in enumerate(members):
            self.kernel.read(routine, Place(array=array, index=(number,)), sent, sender=member)

    def argmax(self, phase: ArgmaxPhase) -> None:
        self.mask_tokens(phase)
        self.kernel.load("local_argmax", phase.logits)
        self.best(phase.exchange)
        self.meeting(phase.meets)

    def best(self, exchange: str | None) -> None:
        """The ranks' largest logits are exchanged, if there is anybody to exchange them with."""
        if exchange and self.kernel.program.ranks > 1:
            self.one_shot(exchange, ARGMAX)

    def all_gather(self, phase: AllGatherPhase) -> None:
        if phase.part is not Part.FINISH:
            for part in phase.parts:
                self.kernel.load(GATHER, part)
        self.one_shot(phase.exchange, GATHER, phase.part)
        if phase.part is not Part.START:
            for output in phase.outputs:
                self.kernel.store(GATHER, output)
            self.meeting(phase.meets)

    def meeting(self, meets: bool) -> None:
        """All ranks wait for each other behind an exchange, where that is needed."""
        if meets:
            self.barrier("entry_barrier")

    def mask_tokens(self, phase: ArgmaxPhase | AcceptPhase) -> None:
        """Logits of tokens that are not allowed are changed in place, if there are masks."""
        if not phase.masks:
            return
        kernel = self.kernel
        block = Place(array=f"{phase.masks}_block")
        kernel.wait("mask_tokens", (f"{phase.masks}_sem", (0,)), kernel.size(block))
        kernel.read("mask_tokens", block, Place(array=phase.masks))
        kernel.load("mask_tokens", phase.logits)
        kernel.store("mask_tokens", phase.logits)
