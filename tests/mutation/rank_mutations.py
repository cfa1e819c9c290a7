"""Mistakes between ranks: exchanges, barriers, peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import is_event
from tests.mutation.edits import on_one_rank
from tests.mutation.edits import replacing
from tests.mutation.edits import with_bodies
from tests.mutation.edits import with_loop
from tests.mutation.edits import with_one
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation

# ranks


@mutation("the first exchange starts before the entry barrier", "V601", "two", "eight")
def exchange_before_the_barrier(program: Program) -> Mutant:
    """A fast rank writes into memory that a slow one still uses for another kernel."""
    return everywhere(program, dropping(_entry))


def _entry(event: Event) -> bool:
    return isinstance(event, Signal | Meet) and event.phase == "prologue"


@mutation("the entry barrier leaves out one rank", "V607", "eight")
def barrier_of_fewer(program: Program) -> Mutant:
    def fewer(event: Event) -> Iterable[Event]:
        assert isinstance(event, Meet)
        yield replace(event, count=event.count - 1)

    return everywhere(program, replacing(is_event(Meet), fewer))


@mutation(
    "one receive buffer serves consecutive exchanges", "V602", "two", "eight", "dense", "levels"
)
def receive_buffer_without_parity(program: Program) -> Mutant:
    """A fast rank's next message overwrites one that has not been summed."""
    sums = [one for one in program.phases() if isinstance(one, AllReducePhase)]

    def first_buffer(phase: Phase) -> Phase:
        if not isinstance(phase, AllReducePhase):
            return phase
        return replace(phase, exchange=sums[0].exchange)

    return everywhere(with_phases(program, first_buffer))


@mutation("consecutive exchanges share a receive semaphore", "V603", "two", "eight")
def receive_semaphore_without_parity(program: Program) -> Mutant:
    sums = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    semaphore = (f"{sums[0].exchange}_sems", (1,))

    def shared(event: Event) -> Iterable[Event]:
        if isinstance(event, Send):
            yield replace(event, received=semaphore)
        elif isinstance(event, Receive):
            yield replace(event, semaphore=semaphore)

    def of_a_sum(event: Event) -> bool:
        return isinstance(event, Send | Receive) and event.phase in {one.id for one in sums}

    return everywhere(program, replacing(of_a_sum, shared))


@mutation("ranks do not meet behind an exchange that follows itself", "V602", "meets")
def meeting_left_out(program: Program) -> Mutant:
    def alone(phase: Phase) -> Phase:
        return replace(phase, meets=False) if isinstance(phase, AllReducePhase) else phase

    return everywhere(with_phases(program, alone))


@mutation("one rank runs a loop once less", "V701", "two", "eight")
def one_rank_ends_early(program: Program) -> Mutant:
    return on_one_rank(program, with_loop(program, -1))


@mutation("one rank does two exchanges in the other order", "V701", "two", "eight")
def exchanges_in_other_order(program: Program) -> Mutant:
    sums = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    other = {sums[0].exchange: sums[1].exchange, sums[1].exchange: sums[0].exchange}

    def exchanged(phase: Phase) -> Phase:
        if not isinstance(phase, AllReducePhase):
            return phase
        return replace(phase, exchange=other.get(phase.exchange, phase.exchange))

    return on_one_rank(program, with_phases(program, exchanged))


@mutation("one rank has a smaller receive buffer", "V605", "two", "eight")
def no_room_on_one_rank(program: Program) -> Mutant:
    plans = with_one(
        program.exchanges, lambda one: one.kind == "one_shot", columns=program.exchanges[0].columns
    )
    return on_one_rank(program, replace(program, exchanges=plans))


@mutation("every rank sends to the rank behind it only", "V603", "eight")
def peers_mistaken(program: Program) -> Mutant:
    def behind(rank: int, event: Event) -> Iterable[Event]:
        if isinstance(event, Send):
            yield replace(event, peer=(rank + 1) % program.ranks)
        else:
            yield event

    return everywhere(program, behind)


@mutation("a message goes to a rank that does not exist", "V605", "two")
def peer_beyond_the_mesh(program: Program) -> Mutant:
    def beyond(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        yield replace(event, peer=program.ranks)

    return everywhere(program, replacing(is_event(Send), beyond))


@mutation("a rank puts its message where another rank's belongs", "V606", "eight")
def places_mistaken(program: Program) -> Mutant:
    def mistaken(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        place = (event.target.index[0] + 1) % program.ranks
        yield replace(event, target=replace(event.target, index=(place,)))

    return everywhere(program, replacing(is_event(Send), mistaken))


@mutation("a sum is taken before the messages have arrived", "V606", "two", "shares", "levels")
def receive_wait_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Receive)))


@mutation("a send buffer is used again while it is still being sent", "V301", "two", "eight")
def sent_wait_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "wait_send")))


@mutation("a wait for a message is for half of its bytes", "V604", "two", "shares", "levels")
def half_a_message_waited(program: Program) -> Mutant:
    def half(event: Event) -> Iterable[Event]:
        assert isinstance(event, Receive)
        yield replace(event, size=event.size // 2)

    return everywhere(program, replacing(is_event(Receive), half))


@mutation("a two-phase sum sends a share before it is complete", "V301", "shares")
def share_summed_late(program: Program) -> Mutant:
    """The sum is stored again behind the first send of it."""

    def again(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        yield event
        yield Write(phase=event.phase, routine="all_reduce", place=event.source, data=event.source)

    def gather(event: Event) -> bool:
        return isinstance(event, Send) and event.target.array.endswith("_gathered")

    return everywhere(program, replacing(gather, again))


@mutation("a two-phase sum scatters the wrong share", "V606", "shares")
def wrong_share(program: Program) -> Mutant:
    def first_share(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        yield replace(event, source=replace(event.source, first=0))

    def scatter(event: Event) -> bool:
        return isinstance(event, Send) and event.target.array.endswith("_scattered")

    return everywhere(program, replacing(scatter, first_share))


@mutation("the logits are reduced before the head has been computed", "V203", "one", "eight")
def argmax_too_early(program: Program) -> Mutant:
    """The argmax stands first of the phases behind the loops."""

    def early(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        found = [one for one in body if isinstance(one, ArgmaxPhase)]
        rest = tuple(one for one in body if not isinstance(one, ArgmaxPhase))
        return (*rest[:1], *found, *rest[1:])

    return everywhere(with_bodies(program, early))


@mutation("a read of weights takes the load behind the one that it needs", "V202", "dense")
def weights_of_the_next_load(program: Program) -> Mutant:
    def late(event: Event) -> Iterable[Event]:
        assert isinstance(event, Read)
        assert event.data is not None
        yield replace(event, data=replace(event.data, first=event.data.first + 256))

    def weights(event: Event) -> bool:
        return isinstance(event, Read) and event.place.array == "tape_ring"

    return everywhere(program, replacing(weights, late))
