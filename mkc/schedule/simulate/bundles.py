"""Cycles of every phase, read from the machine code that the TPU compiler emitted for a kernel.

The compiler's dump has two files for this. `*-final_bundles.txt` is the program: one bundle of
instructions per line, a `>` per enclosing loop, `LB` where a loop begins, and a pair of trace
markers around every phase (`codegen_pallas.aot_phases` compiles a kernel so). Bundles are issued in
order, but a bundle waits for the results it reads, so their number alone is too low a time.
`*-critical-path.txt` holds the compiler's own latencies: each block's longest chain of dependent
instructions with the cycles left to its end.

A phase's time is that of an in-order core: a bundle issues one cycle after the one before, when its
operands are ready and the cross-lane unit is free. The compiler packs pushes of weights closer than
the chip was seen to take them; they are counted here and timed by the target (see `costs`).

The time that waits for copies take is not in here; the simulator adds it. Nor is the code that
starts messages one after the other, because the target's time of a message's start includes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*(>*)\s*\{(.*)$")
MARKER = re.compile(r"TraceMe(Start|End)\((p\d+)\)")
COMMENT = re.compile(r"/\*.*?\*/")
NAME = re.compile(r"%[a-z]*?(\d+)(?:_\w+)?")
OPCODE = re.compile(r"^([a-z]\w*(?:\.\w+)*)")
RESULT_SLOT = re.compile(r"mrb\[(\d+)\]\.(mxu\d)")
STEP = re.compile(r"^\s+Length to end: (\d+), (?:%\w+ = )?([a-z]\w*(?:\.\w+)*)")
UNIT = re.compile(r"\.(?:xlu\d|mxu\d)")
LOOP_LABEL = "LB"
PUSH = "vmatpush"
MATMUL = "vmatmul"
RESULT_POP = "vpop.f32.mrb"
RESULT_SLOTS = 4  # results of one product, in consecutive slots
NORMAL_LATENCY = 2  # of an instruction that is on no listed chain: most vector arithmetic
CROSS_LANE = re.compile(r"\.xlu\d")
MESSAGE = "/* vmem-to-vmem */"  # how the listing comments on a copy to another device
COPY_WAIT = "dma.done.wait"


@dataclass(frozen=True, kw_only=True)
class PhaseCycles:
    """Machine code of a phase, or of one iteration of a run-time loop in it.

    Attributes:
      bundles: instruction bundles outside its loops.
      cycles: their time on an in-order core, without that between starts of messages.
      pushes: instructions among them that push weights into the matrix units.
      messages: to other devices that it starts, outside its loops.
      loops: its run-time loops, in order.
    """

    bundles: int
    cycles: float
    pushes: int
    messages: int = 0
    loops: tuple[PhaseCycles, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a bundle: results and operands are numbers of values."""

    opcode: str
    results: tuple[int, ...]
    operands: tuple[int, ...]
    slot: tuple[int, str] | None  # of the matrix unit's result buffer


@dataclass(kw_only=True)
class Line:
    """One bundle; `depth` counts the loops around it, `sends` says that it starts a message."""

    depth: int
    begins_loop: bool
    instructions: tuple[Instruction, ...]
    sends: bool = False

    @property
    def waits(self) -> bool:
        """For a copy or a message."""
        return any(one.opcode == COPY_WAIT for one in self.instructions)


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """What the compiler says about instructions: cycles to the result, cycles until the next."""

    result: Mapping[str, int]
    interval: Mapping[str, int]

    def of(self, opcode: str) -> int:
        """Cycles from an instruction to the first that may use its result."""
        name = family(opcode)
        return self.result.get(name, self.result.get(f"{name}.pop", NORMAL_LATENCY))

    def between(self, opcode: str) -> int:
        """Cycles for which an instruction occupies the cross-lane unit."""
        return self.interval.get(family(opcode), 1)


def bundle_costs(dump: Path, kernel_name: str) -> dict[str, PhaseCycles]:
    """Cycles of every phase of a kernel that was compiled with phase markers.

    Args:
      dump: folder of the compiler's dump.
      kernel_name: `NAME` of the kernel.

    Returns:
      By phase id; empty when the dump has no machine code of the kernel or no markers.
    """
    code = [
        path
        for path in sorted(dump.glob(f"*{kernel_name}*-final_bundles.txt"))
        if "schedule-analysis" not in path.name
    ]
    chains = sorted(dump.glob(f"*{kernel_name}*-critical-path.txt"))
    if not code:
        return {}
    texts = [path.read_text(encoding="utf-8") for path in chains]
    return phase_cycles(code[-1].read_text(encoding="utf-8"), latencies(texts))


def phase_cycles(code: str, known: Latencies) -> dict[str, PhaseCycles]:
    """Cycles of every marked phase of a listing; `known` are the compiler's latencies."""
    return {phase: _measure(lines, known) for phase, lines in marked_phases(code).items()}


def family(opcode: str) -> str:
    """An opcode without the unit that the scheduler chose for it."""
    return UNIT.sub("", opcode)


def latencies(listings: Iterable[str]) -> Latencies:
    """Reads critical-path listings.

    Two neighbours of a chain tell the cycles that the first one takes. An instruction whose result
    is read shows its latency, one that only has to follow another its interval: the largest and the
    smallest number seen.
    """
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for listing in listings:
        before: tuple[int, str] | None = None
        for line in listing.splitlines():
            match = STEP.match(line)
            if match is None:
                before = None
                continue
            left = int(match[1])
            if before is not None and before[0] > left:
                seen[family(before[1])][before[0] - left] += 1
            before = (left, match[2])
    return Latencies(
        result={name: max(counts) for name, counts in seen.items()},
        interval={name: min(counts) for name, counts in seen.items()},
    )


def marked_phases(code: str) -> dict[str, list[Line]]:
    """The bundles between the markers of every phase."""
    phases: dict[str, list[Line]] = {}
    current: list[Line] | None = None
    bundles = [match for text in code.splitlines() if (match := BUNDLE.match(text)) is not None]
    for match, depth in zip(bundles, _depths(bundles), strict=True):
        text = match.string
        marker = MARKER.search(text)
        if marker is not None:
            current = phases.setdefault(marker[2], []) if marker[1] == "Start" else None
        elif current is not None:
            current.append(
                Line(
                    depth=depth,
                    begins_loop=match[1] == LOOP_LABEL,
                    instructions=tuple(_instructions(match[3])),
                    sends=MESSAGE in text,
                )
            )
    return phases


def _depths(bundles: Sequence[re.Match[str]]) -> list[int]:
    """The loops around every bundle.

    One without a mark is in no loop; but some within a loop have none either, the profiler's and
    predicated ones. Such a bundle is recognised by what follows: the rest of its loop.
    """
    found, following = [], 0
    for match in reversed(bundles):
        marks = len(match[2])
        if marks:
            following = marks - 1 if match[1] == LOOP_LABEL else -1
        found.append(marks or following)
    found.reverse()
    depth = 0
    for number, marks in enumerate(found):
        depth = depth if marks < 0 else marks
        found[number] = depth
    return found


def _instructions(text: str) -> Iterator[Instruction]:
    for part in COMMENT.sub("", text).split(";;"):
        left, assigned, right = part.partition(" = ")
        results, body = (left, right) if assigned else ("", left)
        body = body.strip(" {}")
        opcode = OPCODE.match(body)
        if opcode is None:
            continue
        slot = RESULT_SLOT.search(body)
        name = opcode[1]
        if name.startswith((MATMUL, "vpop.f32")):
            name = body.split("[")[0].split(" ")[0]
        yield Instruction(
            opcode=name,
            results=tuple(int(one) for one in NAME.findall(results)),
            operands=tuple(int(one) for one in NAME.findall(body)),
            slot=(int(slot[1]), slot[2]) if slot else None,
        )


@dataclass(kw_only=True)
class Core:
    """An in-order core: when each value is ready and each unit is free."""

    known: Latencies
    now: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    products: dict[tuple[int, str], float] = field(default_factory=dict)

    def run(self, lines: list[Line]) -> float:
        """Cycles of straight-line bundles, without those from a message's start to the next one."""
        start, between = self.now, 0.0
        sent: float | None = None  # when the last message was started that nobody waits for yet
        for line in lines:
            self._issue(line.instructions)
            if line.waits:
                sent = None
            elif line.sends:
                between += 0.0 if sent is None else self.now - sent
                sent = self.now
        return self.now - start - between

    def _issue(self, instructions: tuple[Instruction, ...]) -> None:
        at = self.now
        for one in instructions:
            at = max(at, *(self.ready.get(name, 0.0) for name in one.operands), 0.0)
            unit = _unit(one.opcode)
            if unit:
                at = max(at, self.busy.get(unit, 0.0))
            if one.opcode.startswith(RESULT_POP) and one.slot is not None:
                first = one.slot[0] - one.slot[0] % RESULT_SLOTS
                at = max(at, self.products.get((first, one.slot[1]), 0.0))
        for one in instructions:
            unit = _unit(one.opcode)
            if unit:
                self.busy[unit] = at + self.known.between(one.opcode)
            done = at + self.known.of(one.opcode)
            if one.opcode.startswith(MATMUL) and one.slot is not None:
                self.products[one.slot] = done
            for name in one.results:
                self.ready[name] = done
        self.now = at + 1.0


def _unit(opcode: str) -> str:
    """The cross-lane unit that takes one such instruction at a time; empty for the others."""
    match = CROSS_LANE.search(opcode)
    return match[0] if match and not opcode.startswith("vpop") else ""


def _measure(lines: list[Line], known: Latencies) -> PhaseCycles:
    straight, loops = _split(lines)
    return PhaseCycles(
        bundles=len(straight),
        cycles=Core(known=known).run(straight),
        pushes=sum(one.opcode.startswith(PUSH) for line in straight for one in line.instructions),
        messages=sum(line.sends for line in straight),
        loops=tuple(_measure(body, known) for body in loops),
    )


def _split(lines: list[Line]) -> tuple[list[Line], list[list[Line]]]:
    """Bundles outside the outermost loops, and the bodies of these; a body's label is taken off."""
    straight: list[Line] = []
    loops: list[list[Line]] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        if not line.begins_loop:
            straight.append(line)
            index += 1
            continue
        body = [replace(line, begins_loop=False)]
        index += 1
        while index < len(lines) and _continues(lines[index], line.depth):
            body.append(lines[index])
            index += 1
        loops.append(body)
    return straight, loops


def _continues(line: Line, depth: int) -> bool:
    """The bundle belongs to a loop of this depth."""
    return line.depth > depth or (line.depth == depth and not line.begins_loop)
