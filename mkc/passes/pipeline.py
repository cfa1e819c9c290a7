"""The passes in order, and their text form: `tile{load_bytes=2MiB},residency{cache_tile=64}`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
from typing import Any

from mkc.errors import PassSpecError
from mkc.errors import VmemError
from mkc.ir.graph import Graph
from mkc.ir.verify import findings
from mkc.passes import shard_rules as shard_rules  # registers the SHARD facets
from mkc.passes import shard_rules_experts as shard_rules_experts
from mkc.passes import shard_rules_spec as shard_rules_spec
from mkc.passes.cache_forms import record_cache_form
from mkc.passes.dtypes import check_dtypes
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import infer_local
from mkc.passes.p20_fuse import Fuse
from mkc.passes.p30_tile import ROW_BYTES
from mkc.passes.p30_tile import Tile
from mkc.passes.p30_tile import Tiles
from mkc.passes.p40_collectives import ONE_SHOT
from mkc.passes.p40_collectives import TWO_LEVEL
from mkc.passes.p40_collectives import TWO_PHASE
from mkc.passes.p40_collectives import TWO_STEP
from mkc.passes.p40_collectives import ChooseCollectives
from mkc.passes.p40_collectives import Collectives
from mkc.passes.p50_residency import Place
from mkc.passes.p50_residency import Residency
from mkc.passes.p60_prefetch import Prefetch
from mkc.passes.p70_lower import Lower
from mkc.passes.steps import StepGraph
from mkc.passes.streams import CACHE_ROW_TILE
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Program
from mkc.targets import Target

ROW_TILE = 8  # f32 rows of a memory tile: activation buffers have a multiple of it
ALGORITHMS = ("auto", ONE_SHOT, TWO_PHASE, TWO_LEVEL, TWO_STEP)  # of exchanges
WIRES = ("f32", "bf16")  # of partial sums
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}
PASS = re.compile(r"\s*([a-z]+)(?:\{([^{}]*)\})?\s*(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """What the passes make of a graph: the program, and what it came from.

    Attributes:
      pipeline: the passes and their options, as text.
    """

    pipeline: str
    program: Program
    steps: StepGraph
    tiles: Tiles
    residency: Residency
    log: DecisionLog

    @property
    def is_short(self) -> bool:
        """The ring has fewer slots than were wanted: other arrays take the VMEM."""
        return self.residency.slots < self.tiles.slots


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A graph that is divided over ranks and cut into steps, and the decisions so far."""

    steps: StepGraph
    padded_rows: int
    log: DecisionLog


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The passes from the graph to the program, in order; the fields are their names."""

    shard: Shard
    fuse: Fuse = field(default_factory=Fuse)
    tile: Tile = field(default_factory=Tile)
    collectives: ChooseCollectives = field(default_factory=ChooseCollectives)
    residency: Place = field(default_factory=Place)
    prefetch: Prefetch = field(default_factory=Prefetch)
    lower: Lower = field(default_factory=Lower)

    def run(self, graph: Graph, target: Target) -> Lowered:
        """Runs all passes for one target."""
        return self.finish(self.prepare(graph, target), target)

    def prepare(self, graph: Graph, target: Target) -> Prepared:
        """The passes that do not depend on what fits into VMEM."""
        log = DecisionLog()
        check_dtypes(graph)
        padded_rows = -(-graph.rows // ROW_TILE) * ROW_TILE
        sharded = self.shard.apply(graph, log, target=target)
        infer_local(sharded.graph)
        _assert_valid(sharded.graph)
        record_cache_form(sharded.graph, target, log)
        steps = self.fuse.apply(sharded, log)
        return Prepared(steps=steps, padded_rows=padded_rows, log=log)

    def finish(self, prepared: Prepared, target: Target) -> Lowered:
        """The other passes. Raises `VmemError` when not everything fits."""
        steps, padded_rows, log = prepared.steps, prepared.padded_rows, prepared.log
        tiles, collectives, residency, log = self._placed(steps, padded_rows, target, log)
        prefetched = self.prefetch.apply(steps, tiles, residency.slots, self.lower.rounds, log)
        program = self.lower.apply(
            steps, tiles, collectives, residency, prefetched, padded_rows, target
        )
        return Lowered(
            pipeline=str(self),
            program=program,
            steps=steps,
            tiles=tiles,
            residency=residency,
            log=log,
        )

    def _placed(
        self, steps: StepGraph, padded_rows: int, target: Target, log: DecisionLog
    ) -> tuple[Tiles, Collectives, Residency, DecisionLog]:
        """Loads, exchanges and places; with smaller loads where they would not fit otherwise.

        A ring has at least a few slots, and the largest load is the size of each. Raises the
        `VmemError` of the smallest loads when they do not help.
        """
        tile = self.tile
        first: VmemError | None = None
        while True:
            attempt = DecisionLog(decisions=list(log.decisions))
            if first is not None:
                attempt.choose(
                    "tile.load_bytes",
                    passed=tile.name,
                    chosen=tile.load_bytes,
                    because="larger loads leave too little VMEM for everything else",
                    rejected={"the wanted size": f"{first.needed_bytes} bytes of VMEM"},
                )
            tiles = tile.apply(steps, target, attempt)
            collectives = self.collectives.apply(
                steps, padded_rows, self.lower.rounds, target, attempt
            )
            try:
                residency = self.residency.apply(
                    steps, tiles, collectives, padded_rows, target, attempt
                )
            except VmemError as error:
                first = first or error
                smaller = tiles.slot_rows * ROW_BYTES // 2
                if self.tile.load_bytes or smaller < target.dma.minimum_load_bytes:
                    raise
                tile = replace(self.tile, load_bytes=smaller)
                continue
            return tiles, collectives, residency, attempt

    def __str__(self) -> str:
        return ",".join(_print(getattr(self, one.name)) for one in fields(self))

    def override(self, text: str) -> Pipeline:
        """This pipeline with the options that `text` names. Raises `PassSpecError`."""
        pipeline = self
        position = 0
        known = [one.name for one in fields(self)]
        while position < len(text):
            match = PASS.match(text, position)
            if match is None or match.end() == position:
                raise PassSpecError(text=text, problem=f"cannot read '{text[position:]}'")
            name, options = match.group(1), match.group(2) or ""
            if name not in known:
                raise PassSpecError(text=text, problem=f"no pass '{name}'", known=known)
            changed = _with_options(getattr(pipeline, name), options, text)
            pipeline = replace(pipeline, **{name: changed})
            position = match.end()
        for problem in _nonsense(pipeline):
            raise PassSpecError(text=text, problem=problem)
        return pipeline


def _assert_valid(graph: Graph) -> None:
    """A pass that breaks a graph is a fault of mkc, not of the model."""
    found = findings(graph)
    assert not found, f"after sharding: {found[0]}"


def _nonsense(pipeline: Pipeline) -> Iterator[str]:
    """Values that an option can be written with, but no kernel can be made with."""
    algorithm, tile = pipeline.collectives.algorithm, pipeline.residency.cache_tile
    if algorithm not in ALGORITHMS:
        yield f"algorithm '{algorithm}' is none of {', '.join(ALGORITHMS)}"
    if pipeline.collectives.wire not in WIRES:
        yield f"wire '{pipeline.collectives.wire}' is none of {', '.join(WIRES)}"
    if 0 < pipeline.residency.largest_tile < CACHE_ROW_TILE:
        yield f"largest_tile is below {CACHE_ROW_TILE}, the rows of a memory tile"
    if tile % CACHE_ROW_TILE:
        yield f"cache_tile {tile} is no multiple of {CACHE_ROW_TILE}, the rows of a memory tile"
    if bool(pipeline.tile.step) != bool(pipeline.tile.step_load_bytes):
        yield "step and step_load_bytes of pass 'tile' belong together"
    if pipeline.residency.state_slots == 1:
        yield "state_slots is 1; a state is used and another written back at the same time"
    if pipeline.residency.fewest_slots < 1:
        yield "fewest_slots is 0; the ring of the tape has at least one slot"
    if pipeline.fuse.narrow_columns > TAPE_LANES:
        yield f"narrow_columns is above {TAPE_LANES}, the columns of one block of the tape"
    for name, value in (("ranks", pipeline.shard.ranks), ("rounds", pipeline.lower.rounds)):
        if value < 1:
            yield f"{name} is {value}; expected at least 1"


def _print(one: Any) -> str:
    options = ",".join(f"{part.name}={getattr(one, part.name)}" for part in fields(one))
    return f"{one.name}{{{options}}}" if options else str(one.name)


def _with_options(one: Any, options: str, text: str) -> Any:
    known = {part.name: getattr(one, part.name) for part in fields(one)}
    values = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, _, value = option.partition("=")
        if key not in known:
            raise PassSpecError(
                text=text, problem=f"pass '{one.name}' has no option '{key}'", known=known
            )
        values[key] = _value(value, known[key], text)
    return replace(one, **values)


def _value(value: str, old: object, text: str) -> object:
    if isinstance(old, bool):
        if value not in ("True", "False"):
            raise PassSpecError(text=text, problem=f"'{value}' is neither True nor False")
        return value == "True"
    if isinstance(old, int):
        match = re.fullmatch(r"(\d+)(KiB|MiB)?", value)
        if match is None:
            raise PassSpecError(text=text, problem=f"'{value}' is not a number")
        return int(match.group(1)) * UNITS[match.group(2) or ""]
    return value
