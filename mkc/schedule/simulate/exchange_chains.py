"""How often a round waits for other ranks, and how far the messages go that it waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mkc.schedule.simulate.analysis import Window
from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.fabric import Hop

LINK = "link:"  # tracks of messages
OUTSIDE = -1  # of every loop
FARTHER = tuple(Hop)


@dataclass(frozen=True, kw_only=True)
class ExchangeChains:
    """Dependent phases of exchanges: messages that are sent together and waited for together.

    A phase can only begin when the one before has ended. Each is counted under the class of the
    farthest link that it uses; classes without any are left out.

    Attributes:
      round: of the whole round.
      loop_body: of one turn of the loop that has most, without the loops inside it. That is one
        layer, or a few that stand in one body.
    """

    round: dict[str, int]
    loop_body: dict[str, int]


def exchange_chains(run: Run, window: Window) -> ExchangeChains:
    """Counts the phases of a round on the window's rank."""
    whole: Counter[str] = Counter()
    layers: dict[int, Counter[str]] = {}
    farthest: Hop | None = None  # of the messages that were sent since a message was waited for
    layer = OUTSIDE
    for event in run.events:
        if event.rank != window.rank or not window.start_us <= event.start_us < window.end_us:
            continue
        if event.kind is Kind.MESSAGE:
            hop = Hop(event.track.removeprefix(LINK))
            farthest = max(farthest or hop, hop, key=FARTHER.index)
            layer = event.layer
        elif event.track == CORE and farthest is not None and _waits_for_message(run, event.took):
            whole[str(farthest)] += 1
            layers.setdefault(layer, Counter())[str(farthest)] += 1
            farthest = None
    layers.pop(OUTSIDE, None)
    most = max(layers.values(), key=Counter.total, default=Counter[str]())
    return ExchangeChains(round=_near_to_far(whole), loop_body=_near_to_far(most))


def _waits_for_message(run: Run, took: tuple[int, ...]) -> bool:
    return any(run.events[one].kind is Kind.MESSAGE for one in took)


def _near_to_far(counts: Counter[str]) -> dict[str, int]:
    return {str(hop): counts[hop] for hop in FARTHER if counts[hop]}
