"""Streams of one step: pages of small vectors, narrow weights, states and caches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from itertools import count

import numpy as np

from mkc.errors import ContextError
from mkc.ir import ops
from mkc.ir import ops_spec
from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.types import DType
from mkc.passes.p20_fuse import NARROW_ROWS
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.passes.steps import is_round
from mkc.passes.steps import lanes
from mkc.passes.steps import python_name
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.stream_plans import PageRow
from mkc.schedule.stream_plans import StreamPlan

ROW_TILE = 8  # f32 rows of a memory tile
CACHE_ROW_TILE = 16  # bf16 rows: a cache row is written with its aligned block
LARGEST_TILE = 512  # positions per tile: each costs a chain of reductions, however long it is
# Operand that is multiplied as the checkpoint has it: what latents are projected with; what a walk
# corrects logits with.
MATRICES = {StepKind.LATENT_ATTENTION: 3, StepKind.MARKOV_WALK: 2}
PAGE_SLOTS = 2  # the page in use and the next one
MATRIX_SLOTS = 1  # one step uses it; the next item arrives while the rest of the layer goes on
STATE_SLOTS = 4  # in use, being written back, and two arriving
FEWEST_CACHE_SLOTS = 3  # in use, and two arriving
CACHE_SLOTS = 8  # tiles ahead; as many as published kernels keep of their largest copies


@dataclass(frozen=True, kw_only=True)
class Streams:
    """All streams but the tape.

    Attributes:
      pages: page stream -> vectors of one item.
      page_of: step id -> page stream.
      narrow_of: step id -> stream of a narrow matmul.
      matrix_of: step id -> stream of a weight that is read as the checkpoint has it.
      matrices: stream -> parameter key.
      state_of: state key -> stream, for recurrent and convolution states.
      cache_of: key cache state key -> cache.
      value_of: key cache state key -> value cache state key.
    """

    streams: tuple[StreamPlan, ...]
    caches: tuple[CacheStream, ...]
    pages: dict[str, tuple[PageRow, ...]]
    page_of: dict[str, str]
    narrow_of: dict[str, str]
    matrix_of: dict[str, str]
    matrices: dict[str, str]
    state_of: dict[str, str]
    cache_of: dict[str, str]
    value_of: dict[str, str]


def rotary_frequencies(op: ops.RotaryTable) -> tuple[float, ...]:
    """theta^(-2 i / dim) for i < dim / 2, computed in f32 as the reference implementations do."""
    exponents = np.arange(0, op.dim, 2, dtype=np.float32) / np.float32(op.dim)
    values = np.float32(1.0) / np.float32(op.theta) ** exponents
    return tuple(float(value) for value in values.astype(np.float32))


def place_streams(
    graph: StepGraph,
    padded_rows: int,
    *,
    cache_tile: int,
    largest_tile: int,
    state_slots: int,
) -> Streams:
    """Builds every stream. Raises `ContextError` when the caches cannot hold the context."""
    placer = _Placer(
        graph=graph,
        padded_rows=padded_rows,
        cache_tile=cache_tile,
        largest_tile=largest_tile,
        state_slots=state_slots,
    )
    placer.body(graph.body, "top", executions=1)
    return Streams(
        streams=tuple(placer.streams),
        caches=tuple(placer.caches),
        pages=placer.pages,
        page_of=placer.page_of,
        narrow_of=placer.narrow_of,
        matrix_of=placer.matrix_of,
        matrices=placer.matrices,
        state_of=placer.state_of,
        cache_of=placer.cache_of,
        value_of=placer.value_of,
    )


def with_state_slots(streams: Streams) -> Streams:
    """The same with no more than `STATE_SLOTS` slots per state, for a tight VMEM."""
    smaller = tuple(
        replace(one, slots=min(one.slots, STATE_SLOTS)) if one.writes_back else one
        for one in streams.streams
    )
    return replace(streams, streams=smaller)


def with_cache_slots(streams: Streams) -> Streams:
    """State slots as in `with_state_slots`, and `FEWEST_CACHE_SLOTS` tiles per cache."""
    caches = tuple(replace(one, slots=FEWEST_CACHE_SLOTS) for one in streams.caches)
    return replace(with_state_slots(streams), caches=caches)


@dataclass(kw_only=True)
class _Placer:
    """Walks the steps in program order."""

    graph: StepGraph
    padded_rows: int
    cache_tile: int
    largest_tile: int
    state_slots: int
    streams: list[StreamPlan] = field(default_factory=list)
    caches: list[CacheStream] = field(default_factory=list)
    pages: dict[str, tuple[PageRow, ...]] = field(default_factory=dict)
    page_of: dict[str, str] = field(default_factory=dict)
    narrow_of: dict[str, str] = field(default_factory=dict)
    matrix_of: dict[str, str] = field(default_factory=dict)
    matrices: dict[str, str] = field(default_factory=dict)
    state_of: dict[str, str] = field(default_factory=dict)
    cache_of: dict[str, str] = field(default_factory=dict)
    value_of: dict[str, str] = field(default_factory=dict)

    def unique(self, key: str, drop: int = 0) -> str:
        """A short Python name: first and last word of `key` but `drop`, numbered if taken."""
        words = [word for word in re.split(r"[\W_]+", key) if word and not word.isdigit()]
        name = python_name(f"{words[0]}_{words[-1 - drop]}")
        taken = {one.name for one in self.streams} | {one.name for one in self.caches}
        names = (name if number == 1 else f"{name}_{number}" for number in count(1))
        return next(one for one in names if one not in taken)

    def body(self, body: tuple[Step | StepLoop, ...], block: str, executions: int) -> None:
        """Places the streams of one block; each block has at most one page."""
        own = [item for item in body if isinstance(item, Step)]
        self.page(own, f"page_{block}", executions)
        for item in body:
            if isinstance(item, StepLoop):
                self.body(item.body, item.name, executions * item.count)
                continue
            for node in item.nodes:
                self.states(node)
            if item.kind is StepKind.NARROW_MATMUL:
                self.narrow(item)
            elif item.kind in MATRICES:
                self.matrix(item, item.nodes[0].operands[MATRICES[item.kind]])

    def page(self, steps: list[Step], name: str, items: int) -> None:
        """One item holds all small vectors of one execution of the block."""
        rows: list[PageRow] = []
        at = 0
        readers = []
        for step in steps:
            if step.kind not in (StepKind.VECTOR, StepKind.ROUTE, StepKind.MARKOV_WALK):
                continue
            for node in step.nodes:
                for vector in self.vectors(node):
                    if step.id not in readers:
                        readers.append(step.id)
                    if any(_same_vector(one, vector) for one in rows):
                        continue
                    rows.append(_at(vector, at))
                    at += -(-vector.length // VECTOR_LANES)
        if not rows:
            return
        item_rows = -(-at // ROW_TILE) * ROW_TILE
        self.pages[name] = tuple(rows)
        self.page_of.update(dict.fromkeys(readers, name))
        self.streams.append(
            StreamPlan(
                name=name,
                array=f"{name}_items",
                item_shape=(item_rows, VECTOR_LANES),
                dtype=DType.F32,
                items=items,
                slots=min(PAGE_SLOTS, items),
                writes_back=False,
                purpose="small vectors of one layer",
            )
        )

    def vectors(self, node: Node) -> list[PageRow]:
        """The vectors a node reads from a page."""
        if isinstance(node.op, ops.RotaryTable):
            values = rotary_frequencies(node.op)
            return [PageRow(row=0, length=len(values), constant=values)]
        params = self.graph.sharded.graph.params
        found = []
        for name in node.operands:
            if name not in params or isinstance(node.op, MarkovWalk) and name in node.operands[:3]:
                continue  # tables and matrices are no vectors
            shape = params[name].type.shape
            if isinstance(node.op, ops.CausalConv | ops_spec.KeptConv):
                found += [
                    PageRow(row=0, length=shape[0], param=name, tap=tap)
                    for tap in range(node.op.taps)
                ]
            elif isinstance(node.op, ops_spec.DynamicConv):
                found += [
                    PageRow(row=0, length=shape[2], param=name, index=(node.op.side, tap))
                    for tap in range(shape[1])
                ]
            else:
                assert shape[:-1] in ((), (1,)), f"{name}: a vector operation reads a matrix"
                index = (0,) * (len(shape) - 1)
                found.append(PageRow(row=0, length=shape[-1], param=name, index=index))
        return found

    def narrow(self, step: Step) -> None:
        """Weight rows of a narrow matmul, lane block by lane block: item [K / 256 * rows, 256]."""
        params = [self.graph.sharded.graph.params[node.operands[1]] for node in step.nodes]
        K = params[0].type.shape[1]
        rows = -(-sum(one.type.shape[0] for one in params) // NARROW_ROWS) * NARROW_ROWS
        name = f"narrow_{step.id}"
        items = params[0].instances
        self.narrow_of[step.id] = name
        self.streams.append(
            StreamPlan(
                name=name,
                array=f"{name}_items",
                item_shape=(K // TAPE_LANES * rows, TAPE_LANES),
                dtype=DType.BF16,
                items=items,
                slots=min(PAGE_SLOTS, items),
                writes_back=False,
                purpose="weights of projections to a few columns",
            )
        )

    def matrix(self, step: Step, key: str) -> None:
        """A weight that is multiplied from either side: item [N, K]."""
        param = self.graph.sharded.graph.params[key]
        name = f"matrix_{step.id}"
        self.matrix_of[step.id] = name
        self.matrices[name] = key
        self.streams.append(
            StreamPlan(
                name=name,
                array=f"{name}_items",
                item_shape=param.type.shape,
                dtype=DType.BF16,
                items=param.instances,
                slots=MATRIX_SLOTS,
                writes_back=False,
                purpose="weights that are multiplied as the checkpoint has them",
            )
        )

    def states(self, node: Node) -> None:
        """The stream of a node's state."""
        states = self.graph.sharded.graph.states
        local = self.graph.sharded.graph
        match node.op:
            case ops.Attention() | LatentAttention():
                self.cache(node, window=None)
            case ops_spec.BlockAttention() as op:
                self.cache(node, window=op.reach)
            case ops.CausalConv() | ops_spec.KeptConv():
                state = states[node.states[0]]
                taps, channels = state.type.shape
                self.state(
                    node.states[0],
                    item=(taps, -(-local.batch // ROW_TILE) * ROW_TILE, channels),
                    dtype=DType.BF16,
                    items=state.instances,
                    purpose="convolution history of one layer, all sequences",
                )
            case ops.DeltaRule() | ops_spec.KeptDeltaRule():
                state = states[node.states[0]]
                heads, keys, values = state.type.shape
                self.state(
                    node.states[0],
                    item=(heads * keys, values),
                    dtype=DType.F32,
                    items=state.instances * local.batch,
                    purpose="recurrent state of one layer and sequence",
                )
        self.kept_rows(node)

    def kept_rows(self, node: Node) -> None:
        """Streams of the rows that a node keeps to commit them later."""
        local = self.graph.sharded.graph
        for key in node.states:
            state = local.states[key]
            if state.kind is not StateKind.KEPT:
                continue
            width = lanes(state.type.shape)
            if isinstance(node.op, ops_spec.KeptConv):
                item, items = (local.rows, width), state.instances
                purpose = "kept inputs of a convolution of one layer, all sequences"
            else:
                padded = -(-width // VECTOR_LANES) * VECTOR_LANES
                item, items = (state.type.shape[0], padded), state.instances * local.batch
                purpose = "kept rows of the delta rule of one layer and sequence"
            self.state(key, item=item, dtype=state.type.dtype, items=items, purpose=purpose)

    def state(
        self, key: str, *, item: tuple[int, ...], dtype: DType, items: int, purpose: str
    ) -> None:
        name = self.unique(f"state_{key}")
        per_layer = items // self.graph.sharded.graph.states[key].instances
        wanted = self.state_slots or max(STATE_SLOTS, 2 * per_layer)
        self.state_of[key] = name
        self.streams.append(
            StreamPlan(
                name=name,
                array=f"{name}_items",
                item_shape=item,
                dtype=dtype,
                items=items,
                slots=min(wanted, items),
                writes_back=True,
                purpose=purpose,
            )
        )

    def cache(self, node: Node, *, window: int | None) -> None:
        graph = self.graph.sharded.graph
        key_state = graph.states[node.states[0]]
        context, kv_heads, dim = key_state.type.shape
        value_width = None
        if isinstance(node.op, LatentAttention):
            own = lanes(graph.states[node.states[1]].type.shape)
            value_width = -(-own // VECTOR_LANES) * VECTOR_LANES
        tile = self.cache_tile or _largest_tile(context, self.largest_tile)
        if context < CACHE_ROW_TILE or context % CACHE_ROW_TILE or context % tile:
            raise ContextError(
                context=context,
                expected=f"a multiple of {max(tile, CACHE_ROW_TILE)}, the rows of a cache tile",
                hint=f"Use {-(-context // CACHE_ROW_TILE) * CACHE_ROW_TILE}",
            )
        name = self.unique(f"cache_{node.states[0]}", drop=1)
        self.cache_of[node.states[0]] = name
        self.value_of[node.states[0]] = node.states[1]
        self.caches.append(
            CacheStream(
                name=name,
                key_array=f"{name}_keys",
                value_array=f"{name}_values",
                layers=key_state.instances,
                batch=graph.batch,
                context=context,
                width=kv_heads * dim,
                tile=tile,
                slots=CACHE_SLOTS,
                window=window,
                value_width=value_width,
                by_rows=is_round(graph) or value_width is not None,
            )
        )


def _largest_tile(context: int, most: int) -> int:
    """Largest multiple of the row tile that divides the context, up to `most` or the usual."""
    sizes = range(CACHE_ROW_TILE, (most or LARGEST_TILE) + 1, CACHE_ROW_TILE)
    return max((size for size in sizes if context % size == 0), default=CACHE_ROW_TILE)


def _same_vector(a: PageRow, b: PageRow) -> bool:
    return replace(a, row=b.row) == b


def _at(vector: PageRow, row: int) -> PageRow:
    return replace(vector, row=row)
