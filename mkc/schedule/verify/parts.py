"""The two parts of exchanges belong together."""

from __future__ import annotations

from dataclasses import replace

from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.verify.memory import Report

type InParts = AllReducePhase | AllGatherPhase
WHOLE = (ArgmaxPhase, AcceptPhase, TopKPhase, MarkovWalkPhase)


def check_parts(program: Program, report: Report) -> bool:
    """Every start has its end, in the same body and without another exchange between; without that
    nothing else can be said."""
    return _check_body(program.body, report)


def _check_body(body: tuple[Phase | Loop, ...], report: Report) -> bool:
    sound = True
    begun: InParts | None = None

    def wrong(phase: Phase, message: str) -> None:
        nonlocal sound
        sound = False
        report("V608", phase.id, message)

    for item in body:
        if isinstance(item, Loop):
            if begun is not None:
                wrong(begun, f"loop {item.name} begins before the exchange has ended")
                begun = None
            sound = _check_body(item.body, report) and sound
        elif isinstance(item, AllReducePhase | AllGatherPhase):
            if item.part is Part.FINISH:
                if begun is None or not _same(begun, item):
                    wrong(item, "the end of an exchange that was not started before it")
                begun = None
                continue
            if begun is not None:
                wrong(item, f"begins before the exchange of {begun.id} has ended")
            begun = item if item.part is Part.START else None
        elif isinstance(item, WHOLE) and begun is not None:
            wrong(item, f"begins before the exchange of {begun.id} has ended")
    if begun is not None:
        wrong(begun, "the body ends before the exchange has ended")
    return sound


def _same(start: InParts, end: InParts) -> bool:
    """Both parts are of one exchange, of the same operands and buffers."""
    return start == replace(end, id=start.id, title=start.title, part=start.part, meets=start.meets)
