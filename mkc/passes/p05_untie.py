"""Pass 5: gives the token lookup its own copy of a table that projections read too.

A tied embedding is one checkpoint tensor with two readers that want it in two places: the lookup
reads single rows from HBM and every rank needs any of them; the LM head streams a rank's share of
the rows as part of the tape. After this pass each has its own parameter, of the same tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import ClassVar

from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops import Embed
from mkc.schedule.decisions import DecisionLog

SUFFIX = "#lookup"  # of the copy's key


@dataclass(frozen=True, kw_only=True)
class Untie:
    """Separates lookup tables from weights."""

    name: ClassVar[str] = "untie"

    def apply(self, graph: Graph, log: DecisionLog) -> Graph:
        """Returns the graph with a parameter more for every table that has other readers."""
        nodes = list(graph.body.nodes())
        tables = {node.operands[1] for node in nodes if isinstance(node.op, Embed)}
        weights = {
            name for node in nodes if not isinstance(node.op, Embed) for name in node.operands
        }
        shared = sorted(tables & weights)
        if not shared:
            return graph
        copies = {
            f"{key}{SUFFIX}": replace(graph.params[key], key=f"{key}{SUFFIX}") for key in shared
        }
        for key in shared:
            log.choose(
                f"untie.{key}",
                passed=self.name,
                chosen="a copy for the lookup, beside the streamed weight",
                because="a lookup reads single rows that any rank may need; the tape holds shares",
                rejected={"one copy": "the lookup of a row of another rank would need an exchange"},
            )
        body = _with_copies(graph.body, shared)
        return replace(graph, params={**graph.params, **copies}, body=body)


def _with_copies(block: Block, shared: list[str]) -> Block:
    items: list[Node | Repeat] = []
    for item in block.items:
        if isinstance(item, Repeat):
            items.append(replace(item, body=_with_copies(item.body, shared)))
        elif isinstance(item.op, Embed) and item.operands[1] in shared:
            tokens, table = item.operands
            items.append(replace(item, operands=(tokens, f"{table}{SUFFIX}")))
        else:
            items.append(item)
    return Block(items=tuple(items))
