"""Lifetimes of values between steps, and their packing into shared VMEM regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

from mkc.ir.types import DType
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.exchange_plan import Part


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """A set of values that share one buffer, and when it is in use.

    Attributes:
      values: base values; several when a loop carries one into the next.
      first, last: step positions of the first write and the last read.
      matmul_left: every reader is a matmul or a vector chain, at least one is a matmul, and no
        lookup writes it: the buffer is bf16.
    """

    values: tuple[str, ...]
    first: int
    last: int
    matmul_left: bool


@dataclass(kw_only=True)
class _Uses:
    """First definition and reads of one base value."""

    defined: int = -1
    by: StepKind | None = None
    reads: list[tuple[int, StepKind]] = field(default_factory=list)


def external_operands(graph: StepGraph, step: Step) -> list[str]:
    """Base values that a step reads and does not define itself, in order of first use."""
    nodes = (*step.nodes, *step.also)
    inside = {value.name for node in nodes for value in node.results}
    known = graph.sharded.graph
    inputs = {value.name for value in known.inputs}
    found: dict[str, None] = {}
    for node in nodes:
        for name in node.operands:
            if name in known.params or name in inputs or name in graph.scalars:
                continue
            base = graph.resolve(name).base
            if base not in inside:
                found[base] = None
    return list(found)


def defined_values(graph: StepGraph, step: Step) -> list[str]:
    """Base values a step defines."""
    if step.kind is StepKind.TAP:
        return [step.output]
    if step.part is Part.START:
        return []  # its end writes the results
    if step.kind is StepKind.BLOCKS and step.nodes[0].results[0].name in graph.aliases:
        return []  # stored in place
    if step.output:
        return [output for _, output in step.products]
    results = [value.name for node in step.nodes for value in node.results]
    # What is computed in place, such as masked logits, is another name of its operand.
    return [name for name in results if name not in graph.scalars and name not in graph.aliases]


def lifetimes(graph: StepGraph) -> list[Lifetime]:
    """Lifetimes of all values that live between steps, by first use."""
    uses: dict[str, _Uses] = {}
    loops: list[tuple[int, int]] = []
    groups = _Groups()
    end = _scan(graph, graph.body, 0, uses, loops, groups)
    tokens = {
        step.nodes[-1].results[0].name for step in graph.steps() if step.kind is StepKind.ARGMAX
    }
    for name in graph.sharded.graph.outputs.values():
        if name in graph.scalars:
            continue
        base = graph.resolve(name).base
        if base in tokens:
            continue  # token ids go to scalar memory
        uses.setdefault(base, _Uses()).reads.append((end - 1, StepKind.VECTOR))
    by_root: dict[str, list[str]] = {}
    for name in uses:
        by_root.setdefault(groups.root(name), []).append(name)
    found = []
    for names in by_root.values():
        lifetime = _lifetime(names, uses, loops)
        if lifetime is not None:
            found.append(lifetime)
    return sorted(found, key=lambda one: (one.first, one.values))


def _scan(
    graph: StepGraph,
    body: tuple[Step | StepLoop, ...],
    position: int,
    uses: dict[str, _Uses],
    loops: list[tuple[int, int]],
    groups: _Groups,
) -> int:
    """Collects definitions and reads; returns the position after the body."""
    for item in body:
        if isinstance(item, StepLoop):
            start = position
            position = _scan(graph, item.body, position, uses, loops, groups)
            loops.append((start, position - 1))
            for carry in item.carries:
                names = (carry.initial, carry.argument.name, carry.yielded, carry.result.name)
                for name in names:
                    alias = graph.resolve(name)
                    assert alias.width == graph.widths[alias.base], f"{name} is part of a value"
                    groups.join(graph.resolve(names[0]).base, alias.base)
                # The buffer is in use from the first to the last iteration.
                uses.setdefault(carry.argument.name, _Uses()).reads += [
                    (start, StepKind.VECTOR),
                    (position - 1, StepKind.VECTOR),
                ]
            continue
        for name in external_operands(graph, item):
            uses.setdefault(name, _Uses()).reads.append((position, item.kind))
        for name in defined_values(graph, item):
            uses.setdefault(name, _Uses(by=item.kind)).defined = position
            if item.kind is StepKind.TAP:  # every layer adds to what earlier ones have shown
                uses[name].reads.append((0, StepKind.VECTOR))
        position += 1
    return position


def _lifetime(
    names: list[str], uses: dict[str, _Uses], loops: list[tuple[int, int]]
) -> Lifetime | None:
    """One buffer's lifetime; None when nothing outside the defining step reads it."""
    reads = [read for name in names for read in uses[name].reads]
    if not reads:
        return None
    defined = [uses[name].defined for name in names if uses[name].defined >= 0]
    assert defined, f"{names} are read but never defined"
    first = min(defined + [position for position, _ in reads])
    last = max(defined + [position for position, _ in reads])
    for start, end in loops:
        if start <= last <= end and first < start:
            last = max(last, end)
    kinds = {kind for _, kind in reads}
    matmuls = {StepKind.MATMUL, StepKind.NARROW_MATMUL}
    # The lookup stores single rows, which a bf16 tile does not take.
    looked_up = any(uses[name].by is StepKind.EMBED for name in names)
    return Lifetime(
        values=tuple(names),
        first=first,
        last=last,
        matmul_left=bool(kinds & matmuls)
        and kinds <= matmuls | {StepKind.VECTOR}
        and not looked_up,
    )


@dataclass(kw_only=True)
class _Groups:
    """Union-find over value names."""

    parent: dict[str, str] = field(default_factory=dict)

    def root(self, name: str) -> str:
        while self.parent.get(name, name) != name:
            name = self.parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        self.parent[self.root(b)] = self.root(a)


@dataclass(kw_only=True)
class Region:
    """A VMEM array that several buffers use one after the other."""

    name: str
    dtype: DType
    lanes: int
    busy: list[tuple[int, int]] = field(default_factory=list)

    def is_free(self, first: int, last: int) -> bool:
        return all(last < start or end < first for start, end in self.busy)


def pack(wanted: Iterator[tuple[str, DType, int, int, int]]) -> tuple[dict[str, str], list[Region]]:
    """Places (buffer, dtype, lanes, first, last) into regions, widest first.

    Two buffers share a region when their dtypes agree and no step uses both.
    """
    regions: list[Region] = []
    placed: dict[str, str] = {}
    for name, dtype, width, first, last in sorted(
        wanted, key=lambda one: (-one[2], one[3], one[0])
    ):
        region = next(
            (
                one
                for one in regions
                if one.dtype is dtype and one.lanes >= width and one.is_free(first, last)
            ),
            None,
        )
        if region is None:
            region = Region(name=f"region_{len(regions)}", dtype=dtype, lanes=width)
            regions.append(region)
        region.busy.append((first, last))
        placed[name] = region.name
    return placed, regions
