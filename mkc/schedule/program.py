"""The program IR: what one rank executes, in program order.

All ranks run the same program on their own shards. A program knows buffers, streams and phases; it
knows neither the model nor the chip. Values of the graph live in `Buffer`s as [rows, lanes] arrays:
a value of shape [rows, heads, dim] occupies heads * dim consecutive lanes, so splitting an axis is
a change of view and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import Part
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.scalars import RoundPlan
from mkc.schedule.scalars import ScalarArray
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.stream_plans import PageRow
from mkc.schedule.stream_plans import StreamPlan
from mkc.schedule.stream_plans import TapePlan
from mkc.schedule.units import VECTOR_LANES as VECTOR_LANES

TAPE_LANES = 256  # lanes of a tape row: one weight block of the matrix unit, 512 bytes of bf16
STOP_IDS = 8  # stop tokens that a launch of several rounds looks for, for each sequence
RESTING = -1  # position of a sequence that rests, which changes no state; what it emits
ROUNDS = "rounds"  # name of the loop over the rounds of one launch
WORD_BITS = 32  # columns that one word of a token mask covers


def mask_lanes(columns: int) -> int:
    """Words of a row of token masks of one rank: whole registers.

    Bit j of word b * 128 + l is column (b * 32 + j) * 128 + l, so that a register of words becomes
    32 registers of bits without moving a lane.
    """
    return -(-columns // (WORD_BITS * VECTOR_LANES)) * VECTOR_LANES


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A VMEM array that holds activations.

    Attributes:
      name: Python name in the generated kernel.
      shape: [rows, lanes], or with leading dimensions.
      dtype: element type in memory. bf16 values that are read row by row are kept as f32.
      region: buffers of one region share memory because their lifetimes do not overlap.
      region_lanes: lanes of the whole region.
      first, last: positions of the phases that first write and last use it.
      purpose: what it holds, for people.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    region: str
    region_lanes: int
    first: int
    last: int
    purpose: str


@dataclass(frozen=True, kw_only=True)
class View:
    """`width` lanes of a buffer from lane `start`."""

    buffer: str
    start: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An array in HBM (or SMEM) that the kernel is called with; `shape` is one rank's part.

    Attributes:
      role: `tape`, `page`, `narrow`, `matrix`, `experts`, `table`, `state`, `cache`, `carried` for
        rows that rounds hand on, or the name of a scalar input: `tokens`, `positions`, `kept`,
        `rounds`, `budgets`, `stop_ids`, of rounds that sample also `temperature`, `top_k`, `top_p`,
        `min_p`, `seed`, `forced`; or `token_masks`.
      updated: the kernel writes it in place.
      param: parameter key of a table or matrix.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: DType
    updated: bool
    purpose: str
    param: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where a parameter's columns lie: lanes `column` .. `column + width` of the output."""

    param: str
    column: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Product:
    """output = left @ the weights of a matmul."""

    left: View
    output: View


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A case of a refill: `loop` has iterations left and the loops in `ended` have none."""

    loop: str | None
    ended: tuple[str, ...]
    rows: int | None


@dataclass(frozen=True, kw_only=True)
class TileRun:
    """Consecutive loads of a matmul that are consumed and refilled alike, one loop in the kernel.

    Attributes:
      first, count: output steps (`first` .. `first + count`).
      rows: tape rows of one load.
      refill: per load of a step, what is started when it has been consumed.
    """

    first: int
    count: int
    refill: tuple[tuple[Guard, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Base of everything that a rank executes.

    Attributes:
      id: stable id shared by source, plan and pictures, such as `p03`.
      title: what it does, for people.
      location: the author's line.
    """

    id: str
    title: str
    location: Location | None = None


@dataclass(frozen=True, kw_only=True)
class EmbedPhase(Phase):
    """Looks token rows up in the replicated table.

    Attributes:
      source: what is looked up: `tokens` or `positions`, in a round the name of any scalars [rows].
      table: operand name.
      param: parameter key of the table.
    """

    source: str
    table: str
    param: str
    output: View


@dataclass(frozen=True, kw_only=True)
class MatmulPhase(Phase):
    """output = left @ tape matrix.

    Attributes:
      K: contracted length; block_columns of TAPE_LANES columns each are read block by block.
      blocks_per_step: column blocks one load brings (1 when a block takes several loads).
      loads_per_step: loads one column block takes (1 when a load brings whole blocks).
      rows: tape rows per load.
      steps: output steps; the last may be shorter (`last_blocks`, 0 when not).
      rounded_columns: so many from the left are rounded to bf16, the others keep their f32 sums.
      pieces: the parameters, left to right.
      also: other left operands of the same weights, and where their products go.
    """

    left: View
    output: View
    K: int
    columns: int
    blocks: int
    blocks_per_step: int
    loads_per_step: int
    rounded_columns: int
    pieces: tuple[Piece, ...]
    runs: tuple[TileRun, ...] = ()
    also: tuple[Product, ...] = ()

    @property
    def lefts(self) -> tuple[View, ...]:
        """All left operands."""
        return (self.left, *(one.left for one in self.also))

    @property
    def outputs(self) -> tuple[View, ...]:
        """Where the products go, as `lefts`."""
        return (self.output, *(one.output for one in self.also))

    @property
    def steps(self) -> int:
        """Output steps, the shorter last one included."""
        return -(-self.blocks // self.blocks_per_step)

    def step_blocks(self, step: int) -> int:
        """Column blocks of output step `step`."""
        return min(self.blocks_per_step, self.blocks - step * self.blocks_per_step)

    def load_rows(self, step: int) -> int:
        """Tape rows of each load of output step `step`."""
        if self.loads_per_step > 1:
            return self.K // self.loads_per_step
        return self.K * self.step_blocks(step)

    def loads(self) -> tuple[int, ...]:
        """Tape rows of every load in order."""
        return tuple(
            self.load_rows(step) for step in range(self.steps) for _ in range(self.loads_per_step)
        )

    @property
    def tape_rows(self) -> int:
        return self.K * self.blocks


@dataclass(frozen=True, kw_only=True)
class NarrowMatmulPhase(Phase):
    """output = left @ weights^T for a few columns, whose weight rows come through a stream."""

    left: View
    output: View
    stream: str
    K: int
    columns: int
    rounds: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class VectorPhase(Phase):
    """A chain of vector operations.

    Attributes:
      page: stream of the small vectors it reads, empty when it reads none.
      nodes: graph nodes in order; their emission facets write the source.
      states: state key -> stream.
      reads: value name -> where it is.
      writes: value name -> where it goes.
      scalars: value name -> the scalars it is in, in a round.
    """

    page: str
    nodes: tuple[Node, ...]
    states: dict[str, str]
    reads: dict[str, View]
    writes: dict[str, View]
    scalars: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeltaRulePhase(Phase):
    """One step of the delta rule for every sequence; the state stream is changed in place.

    Attributes:
      channels: the decay has a lane for every key channel of a head, not one for the head.
      rounds: the output is rounded to bf16.
    """

    stream: str
    q: View
    k: View
    v: View
    beta: View
    decay: View
    output: View
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: bool = False
    rounds: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionPhase(Phase):
    """Appends a row to the cache and attends to it, for every sequence."""

    cache: str
    q: View
    k: View
    v: View
    output: View
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rounds: bool


@dataclass(frozen=True, kw_only=True)
class AllReducePhase(Phase):
    """Sums partial results over the ranks in rank order; every rank gets the same bits.

    Attributes:
      algorithm: `one_shot`, `two_phase`, `two_level` or `two_step`.
      exchange: name of the receive buffers (see `ExchangePlan`).
      meets: all ranks wait for each other afterwards: the next exchange uses the same buffers.
      rounds: the sum is rounded to bf16.
      part: a start reads the partial sums and writes nothing; phases up to the end of the same
        exchange, in the same body, are no exchanges and leave the partial sums alone.
      scattered: of so many columns, the last ones, a rank gets its own share alone, the last lanes
        of the output.
      group: so many adjoining ranks get all shares; 0 where nothing is scattered.
    """

    algorithm: str
    exchange: str
    partial: View
    output: View
    meets: bool
    rounds: bool
    part: Part = Part.WHOLE
    scattered: int = 0
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class ArgmaxPhase(Phase):
    """Index of the largest logit over all ranks' columns, and the token output.

    Attributes:
      masks: operand with a bit for each column, empty for none. Its copy into VMEM starts with the
        round and is waited for here; columns without their bit become minus infinity, in place.
      meets: as for `AllReducePhase`.
    """

    logits: View
    columns: int
    exchange: str | None
    meets: bool
    masks: str = ""


@dataclass(frozen=True, kw_only=True)
class StreamWaitPhase(Phase):
    """The current item of a stream has landed."""

    stream: str


@dataclass(frozen=True, kw_only=True)
class StreamAdvancePhase(Phase):
    """The current item of a stream is used up; its slot may be refilled."""

    stream: str


@dataclass(frozen=True, kw_only=True)
class Loop:
    """`count` executions of a body. `name` is its counter."""

    name: str
    count: int
    body: tuple[Phase | Loop, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that the code generator, the verifier and the simulator need about one rank.

    Attributes:
      rows: token rows of a step, one sequence behind the other; buffers have `padded_rows`.
      scalars, round: of a round of a speculative scheme; a plain step has none.
      experts, expert_rings: of mixtures of experts.
    """

    name: str
    scheme: str
    ranks: int
    batch: int
    rows: int
    padded_rows: int
    context: int
    operands: tuple[Operand, ...]
    buffers: tuple[Buffer, ...]
    streams: tuple[StreamPlan, ...]
    caches: tuple[CacheStream, ...]
    exchanges: tuple[ExchangePlan, ...]
    tape: TapePlan
    pages: dict[str, tuple[PageRow, ...]]
    body: tuple[Phase | Loop, ...]
    logits: View | None
    logits_whole: bool
    rounds_per_launch: int
    vmem_limit_bytes: int
    scalars: tuple[ScalarArray, ...] = ()
    round: RoundPlan | None = None
    experts: tuple[ExpertPlan, ...] = ()
    expert_rings: tuple[ExpertRing, ...] = ()

    def phases(self) -> Iterator[Phase]:
        """All phases in program order, loop bodies once."""
        yield from phases_of(self.body)


def phases_of(body: tuple[Phase | Loop, ...]) -> Iterator[Phase]:
    """All phases of a body in program order, loop bodies once."""
    for item in body:
        if isinstance(item, Loop):
            yield from phases_of(item.body)
        else:
            yield item
