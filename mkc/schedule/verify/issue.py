"""What the verifier can find, by stable code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Issue:
    """A statement about a program that does not hold.

    Attributes:
      code: key of `CODES`.
      message: what is wrong, with names and numbers.
      where: phase and author's line, or the part of the program.
      hint: what usually causes it.
    """

    code: str
    message: str
    where: str
    hint: str

    def __str__(self) -> str:
        return f"{self.code} at {self.where}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Code:
    """One way to fail: the obligation it belongs to, what must hold, and the usual cause."""

    obligation: str
    holds: str
    hint: str


COPIES = "copies"
READS = "reads"
SLOTS = "slots"
STATE = "state"
COUNTS = "counts"
RANKS = "ranks"
PROGRESS = "progress"
BUDGET = "budget"

OBLIGATIONS = {
    COPIES: "every copy is started once, waited for once, with the same bytes",
    READS: "nothing is read before it has landed, and what is read is what was meant",
    SLOTS: "no place is written while a copy or a message still uses it",
    STATE: "states and caches are written back in place, and read only after that",
    COUNTS: "loops, streams and the tape agree on how much there is",
    RANKS: "every message has its receiver and its room, and overwrites nothing that is in use",
    PROGRESS: "no rank waits for something that never comes",
    BUDGET: "VMEM, SMEM and every array are large enough, with tile padding",
}


def _code(obligation: str, holds: str, hint: str) -> Code:
    return Code(obligation=obligation, holds=holds, hint=hint)


CODES = {
    "V101": _code(
        COPIES,
        "no copy is under way and no semaphore counts anything when the kernel ends",
        "a wait or a drain is missing, or a refill starts a load that nobody uses",
    ),
    "V102": _code(
        COPIES,
        "a wait has a copy to wait for",
        "a start or a refill is missing; on the chip the core waits for ever",
    ),
    "V103": _code(
        COPIES,
        "a wait is for the bytes of the copy",
        "build the wait from the same slice as the start",
    ),
    "V104": _code(
        COPIES,
        "source and target of a copy have the same bytes",
        "the shapes of an array in HBM and of its ring slot differ",
    ),
    "V105": _code(
        COPIES,
        "a copy stays inside its arrays",
        "an item, a row or a slot is counted too far",
    ),
    "V201": _code(
        READS,
        "the copy into a place has been waited for before the place is read",
        "a wait is missing or stands behind the read",
    ),
    "V202": _code(
        READS,
        "a place holds what its reader expects",
        "slots or loads are out of order, or something else has been put there in between",
    ),
    "V203": _code(
        READS,
        "a place has been written before it is read",
        "the phase that makes the value stands behind its reader, or is missing",
    ),
    "V204": _code(
        READS,
        "what was fetched from HBM has not been changed there since",
        "a state is fetched before its write-back",
    ),
    "V301": _code(
        SLOTS,
        "nothing is written where a copy still reads or writes",
        "wait for the copy before the place is used again",
    ),
    "V302": _code(
        SLOTS,
        "no copy goes into or comes out of a place that another one still writes",
        "a slot is refilled too early, or two streams share a slot",
    ),
    "V303": _code(
        SLOTS,
        "what was changed is copied out before something else takes its place",
        "a write-back is missing",
    ),
    "V401": _code(
        STATE,
        "an item is fetched from HBM only after its write-back has been waited for",
        "the prologue of a round starts before the drain of the round before",
    ),
    "V402": _code(
        STATE,
        "an item in HBM is written only when no other copy uses it",
        "a slot is written back while the item is being fetched again",
    ),
    "V403": _code(
        STATE,
        "an item goes back to where it came from",
        "the write-back names another item, layer or row than the fetch",
    ),
    "V404": _code(
        STATE,
        "what the kernel writes in HBM is an operand that is updated in place, or an output",
        "mark the operand as updated: it is donated and returned",
    ),
    "V501": _code(
        COUNTS,
        "a step uses up every item of every stream and every row of the tape, and no more",
        "a loop count, the items of a stream or the rows of the tape is off",
    ),
    "V502": _code(
        COUNTS,
        "a guard asks for a loop that runs around its phase, and the guards cover all ways out",
        "a phase was moved out of its loop without its guards",
    ),
    "V503": _code(
        COUNTS,
        "the runs of a matmul cover its steps once, with loads of one size each",
        "a run was split or joined without its neighbours",
    ),
    "V504": _code(
        COUNTS,
        "a round commits what the one before accepted, and the next one begins behind that",
        "what is carried comes from another array, or an op is given another number of rows",
    ),
    "V505": _code(
        STATE,
        "rows that enter a cache follow those in it, and are the accepted ones where that is known",
        "other positions are given than those of the rows",
    ),
    "V506": _code(
        COUNTS,
        "every place of the taps that is read is stored once in a round",
        "two layers share a place, or a layer that is read has none",
    ),
    "V601": _code(
        RANKS,
        "no message is sent before its receiver has entered the kernel",
        "the entry barrier stands behind the first send, or is missing",
    ),
    "V602": _code(
        RANKS,
        "a message overwrites nothing that its receiver may still read",
        "alternate two receive buffers, put another exchange in between, or let all ranks meet",
    ),
    "V603": _code(
        RANKS,
        "a message cannot be counted by the wait for an earlier one, or for a copy",
        "a receive semaphore serves two exchanges that nothing separates",
    ),
    "V604": _code(
        RANKS,
        "sent and received messages agree in number and bytes on every rank",
        "ranks run different programs, or a peer is left out",
    ),
    "V605": _code(
        RANKS,
        "a message goes to another rank of the mesh and fits into its receive buffer",
        "a peer or the rank's own number is computed wrongly",
    ),
    "V606": _code(
        RANKS,
        "a rank reads a message after its arrival, and the message of the rank it means",
        "a wait is missing, or a sender uses another rank's place",
    ),
    "V607": _code(
        RANKS,
        "in a meeting every rank signals every other one once and waits for all",
        "the signals or the count of the wait were changed",
    ),
    "V608": _code(
        RANKS,
        "an exchange that was started ends in the same body, before another one begins",
        "a start was moved without its end, or other buffers are named in one of them",
    ),
    "V701": _code(
        PROGRESS,
        "the wait-for graph over all ranks has no cycle",
        "ranks run exchanges in different orders, or one rank leaves out a send",
    ),
    "V801": _code(
        BUDGET,
        "all VMEM arrays fit, with tile padding",
        "a smaller batch, a shorter ring or more ranks",
    ),
    "V802": _code(BUDGET, "all scalars fit into SMEM", "fewer rounds per launch"),
    "V803": _code(
        BUDGET,
        "every view lies inside its buffer and is as wide "
        "as its phase needs, and every buffer lies inside its region",
        "a buffer was made narrower than the value it holds",
    ),
    "V804": _code(
        BUDGET,
        "ring slots, cache tiles, stream items, exchange buffers and "
        "arrays of scalars have the sizes that their users need",
        "a slot is smaller than its largest load, or a tile does not divide the context",
    ),
    "V805": _code(
        BUDGET,
        "every name in a phase exists in the program, once and of the kind that is meant",
        "a stream, buffer or exchange was removed but is still used",
    ),
    "V806": _code(BUDGET, "there are enough semaphores", "fewer ring slots or cache tiles"),
}
