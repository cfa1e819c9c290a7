"""Which weights with a whole operand and a whole result are divided all the same.

A projection whose result every rank needs as a whole is either on every rank, or divided by its
output columns, and an exchange gathers them: fewer bytes, one exchange more, the same bits. It may
be divided over all ranks, or over those of each host: more bytes, but fewer and nearer messages.
Projections of one value share an exchange, so they are decided together. The rows of one sequence
decide, so that weights are packed alike for every batch.

The cost of a choice is the time to stream the weights plus that of the exchange, as if neither
could hide the other. The tape goes on during an exchange; where the memory waits for exchanges
anyway, the true cost of bytes is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from mkc.ir import ops
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.passes.rank_ops import AllGather
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import TAPE_LANES
from mkc.targets import Target

PASS = "shard"
WHOLE = "every rank has the whole weight"
GATHERED = "divided by output columns over {} ranks, an exchange gathers them"
TRAVELS_IN = (DType.BF16, DType.F32)


def choose_gathered(
    graph: Graph,
    whole: frozenset[str],
    ranks: int,
    target: Target,
    log: DecisionLog,
    *,
    every: bool = False,
) -> dict[str, int]:
    """Of the parameters `whole` on every rank, those that are cheaper divided and gathered.

    Args:
      every: all that can be, and only over how many ranks is chosen by cost.

    Returns:
      Over how many adjoining ranks each is divided.
    """
    host = target.links.devices_per_host
    sizes = (ranks, host) if 1 < host < ranks and ranks % host == 0 else (ranks,)
    readers: dict[str, list[Node]] = {}
    for node in graph.body.nodes():
        for name in node.operands:
            if name in whole:
                readers.setdefault(name, []).append(node)
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in sorted(whole):
        if any(_divides(graph.params[key].type, readers[key], size) for size in sizes):
            inputs = tuple(node.operands[0] for node in readers[key])
            groups.setdefault(inputs, []).append(key)
    found: dict[str, int] = {}
    for keys in groups.values():
        possible = {
            size: frozenset(
                key for key in keys if _divides(graph.params[key].type, readers[key], size)
            )
            for size in sizes
        }
        dtypes = {key: readers[key][0].results[0].type.dtype for key in keys}
        found |= _cheapest(graph, dtypes, possible, target, log, every=every)
    return found


def _divides(weight: TensorType, readers: list[Node], ranks: int) -> bool:
    """Every rank gets as many columns, side by side, of a dtype that an exchange takes."""
    if not all(
        isinstance(node.op, ops.Linear) and node.results[0].type.dtype in TRAVELS_IN
        for node in readers
    ):
        return False
    rows = weight.axes[0]
    return len(rows.parts) == 1 and rows.parts[0].count % ranks == 0


def _cheapest(
    graph: Graph,
    dtypes: dict[str, DType],
    possible: Mapping[int, frozenset[str]],
    target: Target,
    log: DecisionLog,
    *,
    every: bool,
) -> dict[str, int]:
    """Which of some projections of one value are gathered, in one exchange, and by how many ranks.

    Args:
      dtypes: of the results, by weight.
      possible: by the number of ranks, which weights can be divided over them.
    """
    weights = {key: graph.params[key].type.shape for key in dtypes}

    def cost(size: int, chosen: Sequence[str]) -> float:
        total = 0.0
        for key, (columns, K) in weights.items():
            total += _stream_us(K, columns // size if key in chosen else columns, target)
        if not chosen:
            return total
        share = sum(weights[key][0] // size for key in chosen)
        widest = max(dtypes[key].bytes for key in chosen)
        return total + target.exchange_us(graph.rows_per_sequence * share * widest, size - 1)

    keys = tuple(weights)
    choices = [
        (size, one)
        for size, able in possible.items()
        for count in range(len(keys) + 1)
        for one in combinations(sorted(able), count)
    ]
    most = max(len(one) for _, one in choices) if every else 0
    size, best = min(
        (one for one in choices if len(one[1]) >= most), key=lambda choice: cost(*choice)
    )
    for key in keys:
        others = tuple(one for one in best if one != key)
        costs = {WHOLE: cost(size, others)}
        costs |= {
            GATHERED.format(one): cost(one, (*others, key))
            for one, able in possible.items()
            if able.issuperset((*others, key))
        }
        chosen = GATHERED.format(size) if key in best else WHOLE
        together = f"; with {', '.join(others)} in one exchange" if others else ""
        asked = "; it was asked for" if every else ""
        log.choose(
            f"shard.whole.{key}",
            passed=PASS,
            chosen=f"{chosen}, predicted {costs[chosen]:.2f} us",
            because=f"its result meets a value that every rank has as a whole{together}{asked}",
            rejected={
                other: f"predicted {us:.2f} us" for other, us in costs.items() if other != chosen
            },
        )
    return dict.fromkeys(best, size)


def _stream_us(K: int, columns: int, target: Target) -> float:
    """Time to stream a matrix, whose last block of columns is padded."""
    blocks = -(-columns // TAPE_LANES)
    return K * blocks * TAPE_LANES * DType.BF16.bytes / target.hbm.sustained_bytes_per_us


def join_gathers(block: Block) -> Block:
    """Gathers of projections of one value become one, behind the first of these projections."""
    items = [
        replace(item, body=join_gathers(item.body)) if isinstance(item, Repeat) else item
        for item in block.items
    ]
    makers: dict[str, Node] = {
        value.name: item for item in items if isinstance(item, Node) for value in item.results
    }
    groups: dict[str, list[Node]] = {}
    for item in items:
        if isinstance(item, Node) and isinstance(item.op, AllGather):
            groups.setdefault(makers[item.operands[0]].operands[0], []).append(item)
    moved = {id(one) for group in groups.values() if len(group) > 1 for one in group}
    joined = {id(group[0]): group for group in groups.values() if len(group) > 1}
    later = {id(makers[one.operands[0]]) for group in joined.values() for one in group[1:]}

    def rebuilt() -> Iterator[Node | Repeat]:
        for item in items:
            if isinstance(item, Node) and id(item) in joined:
                group = joined[id(item)]
                yield from (makers[one.operands[0]] for one in group[1:])
                yield Node(
                    op=item.op,
                    operands=tuple(one.operands[0] for one in group),
                    results=tuple(one.results[0] for one in group),
                    location=item.location,
                )
            elif id(item) not in moved and id(item) not in later:
                yield item

    return Block(items=tuple(rebuilt()))
