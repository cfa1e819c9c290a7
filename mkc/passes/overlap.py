"""Work that needs nothing of an exchange goes on while its messages travel.

An exchange becomes two steps, its start and its end, and what stands next to it without need of it
comes to stand between them. Of projections of one value whose results partly travel, those that
travel are computed first, where that costs no further block of weights.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.passes.rank_ops import AllGather
from mkc.passes.steps import Step
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.passes.steps import lanes
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import TAPE_LANES

PASS = "fuse"
EXCHANGES = (StepKind.ALL_REDUCE, StepKind.ALL_GATHER)
# Steps that keep no order with others but that of their values: no states, caches or lookups.
FREE = (StepKind.MATMUL, StepKind.NARROW_MATMUL, StepKind.VECTOR)


def travelling(block: Block) -> frozenset[str]:
    """Values of a block that are gathered from all ranks."""
    nodes = (one for one in block.items if isinstance(one, Node))
    return frozenset(
        name for node in nodes if isinstance(node.op, AllGather) for name in node.operands
    )


def in_order(nodes: Sequence[Node], travel: Collection[str], log: DecisionLog) -> list[list[Node]]:
    """Projections of one value as one matmul, or as two of which the first has what travels.

    The first is filled up with others until both together have no more blocks than one matmul
    would; if there is no such way there is one matmul. Of several the one with most left for the
    second matmul.
    """
    first = [one for one in nodes if one.results[0].name in travel]
    others = [one for one in nodes if one not in first]
    if not first or not others:
        return [list(nodes)]
    ways = [
        [one for one in nodes if one in first or one in filling]
        for count in range(len(others))
        for filling in combinations(others, count)
    ]
    whole = _blocks(nodes)
    found = [
        (early, late)
        for early in ways
        if _blocks(early) + _blocks(late := [one for one in nodes if one not in early]) == whole
    ]
    if not found:
        return [list(nodes)]
    early, late = max(found, key=lambda way: (_blocks(way[1]), -len(way[0])))
    log.choose(
        f"fuse.first.{first[0].results[0].name}",
        passed=PASS,
        chosen=f"with {_names(early)} before the exchange, {_names(late)} beside it",
        because="both matmuls together have as many blocks of weights as one",
        rejected={"one matmul before the exchange": "nothing would go on during its messages"},
    )
    return [early, late]


def _blocks(nodes: Sequence[Node]) -> int:
    columns = sum(lanes(one.results[0].type.shape) for one in nodes)
    return -(-columns // TAPE_LANES)


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.operands[1] for node in nodes)


def overlapped(
    body: tuple[Step | StepLoop, ...], bases: Mapping[str, str]
) -> tuple[Step | StepLoop, ...]:
    """The body with exchanges in two parts where there is something to do between them.

    Args:
      bases: of values that are lanes of another one, that other one.
    """
    items = list(body)
    place = 0
    while place < len(items):
        item = items[place]
        if isinstance(item, StepLoop):
            items[place] = replace(item, body=overlapped(item.body, bases))
        elif item.kind in EXCHANGES:
            first = _before(items, place, bases)
            end = _behind(items, place, bases)
            if first < place or place + 1 < end:
                between = [*items[first:place], *items[place + 1 : end]]
                start = replace(item, part=Part.START)
                items[first:end] = [start, *between, replace(item, part=Part.FINISH)]
                place = end
        place += 1
    return tuple(items)


def _before(items: Sequence[Step | StepLoop], place: int, bases: Mapping[str, str]) -> int:
    """Where the steps begin that stand in front of an exchange and make nothing that it needs."""
    exchange = items[place]
    assert isinstance(exchange, Step)
    needed = _read(exchange, bases)
    while place > 0 and _is_free(one := items[place - 1]) and not _made(one, bases) & needed:
        place -= 1
    return place


def _behind(items: Sequence[Step | StepLoop], place: int, bases: Mapping[str, str]) -> int:
    """Where the steps end that stand behind an exchange and need nothing of it."""
    exchange = items[place]
    assert isinstance(exchange, Step)
    made = _made(exchange, bases)
    end = place + 1
    while end < len(items) and _is_free(one := items[end]) and not _read(one, bases) & made:
        end += 1
    return end


def _is_free(item: Step | StepLoop) -> bool:
    return (
        isinstance(item, Step)
        and item.kind in FREE
        and not any(node.states for node in (*item.nodes, *item.also))
    )


def _read(item: Step | StepLoop, bases: Mapping[str, str]) -> set[str]:
    assert isinstance(item, Step)
    names = (name for node in (*item.nodes, *item.also) for name in node.operands)
    return {bases.get(name, name) for name in names}


def _made(item: Step | StepLoop, bases: Mapping[str, str]) -> set[str]:
    assert isinstance(item, Step)
    values = (value.name for node in (*item.nodes, *item.also) for value in node.results)
    return {bases.get(name, name) for name in values}
