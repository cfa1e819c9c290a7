"""Evaluates the graph of one rank over the operands of its kernel, for many rows of a sequence.

Repeat regions are scans; a weight is a slice of the tape, cut out where it is used, so that no copy
of it outlives the product. States are slices of the kernel's state operands. What an op computes is
its reference meaning, but for the ops that `mkc.runtime.prefill_ops` does faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.errors import UnsupportedOpError
from mkc.ir import ops
from mkc.ir import ops_experts
from mkc.ir import ops_mixing
from mkc.ir import ops_spec
from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.reference import value_types
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import by_sequence
from mkc.ir.reference_ops import storage_dtype
from mkc.ir.reference_ops import wide
from mkc.passes.rank_ops import AllGather
from mkc.passes.rank_ops import JoinParts
from mkc.passes.rank_ops import ScatteredSum
from mkc.passes.rank_ops import ShardedScaleHeads
from mkc.passes.streams import rotary_frequencies
from mkc.runtime.prefill_experts import expert_sum
from mkc.runtime.prefill_latent import attend_latents
from mkc.runtime.prefill_ops import AXIS
from mkc.runtime.prefill_ops import append_rows
from mkc.runtime.prefill_ops import argmax_over_ranks
from mkc.runtime.prefill_ops import attend
from mkc.runtime.prefill_ops import chunked_delta_rule
from mkc.runtime.prefill_ops import contract
from mkc.runtime.prefill_ops import gathered
from mkc.runtime.prefill_ops import own_columns
from mkc.runtime.prefill_ops import sum_over_ranks
from mkc.runtime.prefill_ops import tape_product
from mkc.runtime.prefill_state import Memory
from mkc.runtime.prefill_state import StateAccess
from mkc.runtime.prefill_taps import tap_access
from mkc.runtime.tape_index import BlockIndex
from mkc.runtime.tape_index import Projection
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import MatmulPhase

type Environment = dict[str, Array]

FEWEST_CHANNELS = 128  # half a matrix unit: below it a strided product is not worth its form


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows a call has.

    Attributes:
      slots: sequence of each lane, i32 [L].
      starts: position of each lane's first row, i32 [L].
      counts: rows that are not padding, i32 [L].
      positions: i32 [L, T], negative for padding.
    """

    slots: Array
    starts: Array
    counts: Array
    positions: Array

    @property
    def valid(self) -> Array:
        return self.positions >= 0


@dataclass(kw_only=True)
class _Scope:
    """One execution of one block.

    Attributes:
      index: the block's weights.
      instance: executions of the block before this one.
      values: results by name.
      uses: how often each weight has been used so far.
      products: fused products by phase and input, for the projections that share them.
      vectors: the item of the page, flat.
    """

    index: BlockIndex
    instance: Array
    values: Environment
    uses: Counter[str] = field(default_factory=Counter)
    products: dict[tuple[str, str], Array] = field(default_factory=dict)
    vectors: Array | None = None


@dataclass(kw_only=True)
class GraphWalk:
    """One evaluation; `memory` is changed in place.

    Attributes:
      graph: of one rank, for all rows.
      last: the same graph for one row per lane.
      weights: weight operands of one rank by name.
      states: access to each state that outlives the step, by key.
      all_rows: what comes after the last state is computed for every row, not the last ones only.
      strided: projections take the form that suits the TPU compiler, see `tape_product`.
    """

    graph: Graph
    last: Graph
    weights: Mapping[str, Array]
    states: Mapping[str, StateAccess]
    rows: Rows
    all_rows: bool
    strided: bool

    def __post_init__(self) -> None:
        self.types = value_types(self.graph)
        self.last_types = value_types(self.last)
        self.taps = tap_access(self.graph)

    def run(self, index: BlockIndex, tokens: Array, memory: Memory) -> Environment:
        """Outputs by name; tokens i32 [L * T]."""
        values: Environment = {"tokens": tokens, "positions": self.rows.positions.reshape(-1)}
        # Zero, but only at run time: a slice at a known row loses its place beside the product and
        # becomes a copy, of the whole LM head.
        first = jnp.minimum(self.rows.counts[0], 0)
        scope = _Scope(index=index, instance=first, values=values)
        memory.update({one.array: one.empty(self.graph.rows) for one in self.taps.values()})
        items, last = self.graph.body.items, self.last.body.items
        needed = _needed_by_states(items)
        self.items(tuple(items[one] for one in needed), scope, memory)
        rest = [number for number in range(len(items)) if number not in needed]
        if self.all_rows:
            self.items(tuple(items[one] for one in rest), scope, memory)
        else:
            self.keep_last_rows(values)
            # Several projections may share a product that was computed for all rows.
            scope.products.clear()
            self.items(tuple(last[one] for one in rest), scope, memory)
        return {key: values[name] for key, name in self.graph.outputs.items()}

    def keep_last_rows(self, values: Environment) -> None:
        """Only the last row of every lane that is not padding stays."""
        rows, lanes = self.graph.rows_per_sequence, self.graph.batch
        chosen = jnp.arange(lanes) * rows + jnp.maximum(self.rows.counts - 1, 0)
        for name in values:
            if self.types[name].shape != self.last_types[name].shape:
                values[name] = values[name][chosen]

    def items(self, items: tuple[Node | Repeat, ...], scope: _Scope, memory: Memory) -> None:
        inner = iter(scope.index.inner)
        for item in items:
            if isinstance(item, Repeat):
                self.region(item, next(inner), scope, memory)
            else:
                results = self.node(item, scope, memory)
                for result, array in zip(item.results, results, strict=True):
                    assert array.shape == result.type.shape, f"%{result.name} is {array.shape}"
                    scope.values[result.name] = array

    def region(self, region: Repeat, index: BlockIndex, outer: _Scope, memory: Memory) -> None:
        """Runs a repeat region as a scan that carries the states it changes."""
        keys = [key for node in region.body.nodes() for key in node.states]
        arrays = list(dict.fromkeys(self.array(key) for key in keys))

        def body(carry: tuple[Any, Memory], number: Array) -> tuple[tuple[Any, Memory], None]:
            carried, inner_memory = carry
            values = dict(outer.values)
            for one, array in zip(region.carries, carried, strict=True):
                values[one.argument.name] = array
            scope = _Scope(
                index=index, instance=outer.instance * region.count + number, values=values
            )
            inner_memory = dict(inner_memory)
            self.items(region.body.items, scope, inner_memory)
            return (tuple(values[one.yielded] for one in region.carries), inner_memory), None

        initial = tuple(outer.values[one.initial] for one in region.carries)
        own = {name: memory[name] for name in arrays}
        (final, changed), _ = lax.scan(body, (initial, own), jnp.arange(region.count))
        memory.update(changed)
        for one, array in zip(region.carries, final, strict=True):
            outer.values[one.result.name] = array

    def array(self, key: str) -> str:
        """Name in the memory of what holds a state."""
        return self.taps[key].array if key in self.taps else self.states[key].array

    def node(self, node: Node, scope: _Scope, memory: Memory) -> tuple[Array, ...]:
        match node.op:
            case ops.Linear():
                return (self.linear(node, scope),)
            case ops.Embed():
                table = self.weights[scope.index.tables[node.operands[1]]]
                return (table[scope.values[node.operands[0]]].astype(self.dtype(node)),)
            case ops.RotaryTable() as op:
                return self.rotary_table(op, node, scope)
            case ops.DeltaRule():
                return (self.delta_rule(node, scope, memory),)
            case ops.Attention() as op:
                return (self.attention(op, node, scope, memory),)
            case ops_spec.CacheAppend():
                self.append(node.states, node.operands[:2], scope, memory)
                return ()
            case ops_spec.Tap():
                shown = scope.values[node.operands[0]]
                self.taps[node.states[0]].write(memory, scope.instance, shown)
                return ()
            case ops_spec.ReadTaps() as op:
                return (self.read_taps(op, node, memory),)
            case ops_mixing.LatentAttention() as op:
                return (self.latent_attention(op, node, scope, memory),)
            case ShardedScaleHeads() as op:
                return (self.scale_heads(op, node, scope),)
            case ops_experts.ExpertMlp() as op:
                return (self.experts(op, node, scope),)
            case AllGather() as op:
                return tuple(gathered(scope.values[name], op.ranks) for name in node.operands)
            case JoinParts():
                parts = [scope.values[name] for name in node.operands]
                return (jnp.concatenate(parts, axis=1),)
            case ScatteredSum() as op:
                total = sum_over_ranks(scope.values[node.operands[0]], op.ranks, self.dtype(node))
                return (own_columns(total, op.columns, op.group),)
            case ops.AllReduce() as op:
                partial = scope.values[node.operands[0]]
                return (sum_over_ranks(partial, op.ranks, self.dtype(node)),)
            case ops.MaskTokens():  # a prompt's tokens are given: nothing is masked
                return (scope.values[node.operands[0]],)
            case ops.ShardedArgmax():
                return (argmax_over_ranks(scope.values[node.operands[0]]),)
        return self.as_defined(node, scope, memory)

    def as_defined(self, node: Node, scope: _Scope, memory: Memory) -> tuple[Array, ...]:
        """The reference meaning of the op."""
        function = REFERENCE.find(node.op)
        if function is None:
            raise UnsupportedOpError(
                op=node.op.mnemonic, facet=REFERENCE.name, location=node.location
            )
        context = OpContext(
            rounding="reference",
            operand_types=tuple(self.types[name] for name in node.operands),
            result_types=tuple(result.type for result in node.results),
            valid=self.rows.valid,
        )
        states = tuple(
            self.states[key].read(memory, scope.instance, self.rows.slots) for key in node.states
        )
        operands = tuple(self.operand(name, scope) for name in node.operands)
        results, new_states = function(node.op, operands, states, context)
        for key, new in zip(node.states, new_states, strict=True):
            self.states[key].write(memory, scope.instance, self.rows.slots, new)
        found: tuple[Array, ...] = results
        return found

    def dtype(self, node: Node) -> jnp.dtype:
        return storage_dtype(node.results[0].type.dtype, "reference")

    def operand(self, name: str, scope: _Scope) -> Array:
        """A value, or a small parameter from the page of the block, in f32."""
        if name not in self.graph.params:
            return scope.values[name]
        if scope.vectors is None:
            items = self.weights[scope.index.page]
            scope.vectors = lax.dynamic_index_in_dim(items, scope.instance, keepdims=False).ravel()
        rows = scope.index.vectors[name]
        parts = [
            scope.vectors[row.row * VECTOR_LANES : row.row * VECTOR_LANES + row.length]
            for row in rows
        ]
        if rows[0].tap is None:
            return parts[0].reshape(self.graph.params[name].type.shape)
        return jnp.stack(parts, axis=-1)[:, None, :]  # a convolution weight [channels, 1, taps]

    def linear(self, node: Node, scope: _Scope) -> Array:
        """A projection: some columns of the fused product that it is part of."""
        value, weight = node.operands
        use = scope.index.projections[weight][scope.uses[weight]]
        scope.uses[weight] += 1
        key = (use.phase.id, value)
        if key not in scope.products:
            scope.products[key] = self.product(scope.values[value], use, scope.instance)
        # Rounded whole, so that what shares a product and its dtype shares the rounded one, too.
        piece, rounded = use.piece, scope.products[key].astype(self.dtype(node))
        return rounded[:, piece.column : piece.column + piece.width]

    def product(self, x: Array, use: Projection, instance: Array) -> Array:
        """x [rows, K] times the whole matrix, f32 [rows, columns and their padding]."""
        operand = self.weights[use.array]
        K = use.phase.K
        if isinstance(use.phase, MatmulPhase):
            return tape_product(
                x,
                operand,
                first_row(use.rows, instance),
                blocks=use.phase.blocks,
                granule=use.granule,
                strided=self.strided
                and use.granule >= FEWEST_CHANNELS
                and x.dtype == operand.dtype,
            )
        item = lax.dynamic_index_in_dim(operand, instance, keepdims=False)
        blocks = item.reshape(K // TAPE_LANES, -1, TAPE_LANES)
        split = x.reshape(x.shape[0], K // TAPE_LANES, TAPE_LANES)
        return contract("rbk,bnk->rn", split, blocks)

    def rotary_table(self, op: ops.RotaryTable, node: Node, scope: _Scope) -> tuple[Array, ...]:
        """As defined, with the frequencies of the kernel instead of a power computed here."""
        frequencies = jnp.asarray(rotary_frequencies(op), jnp.float32)
        angle = wide(scope.values[node.operands[0]])[:, None] * frequencies
        return (jnp.cos(angle).astype(self.dtype(node)), jnp.sin(angle).astype(self.dtype(node)))

    def delta_rule(self, node: Node, scope: _Scope, memory: Memory) -> Array:
        lanes = self.graph.batch
        operands = [by_sequence(scope.values[name], lanes) for name in node.operands]
        q, k, v, beta, decay = operands
        state = self.states[node.states[0]]
        old = state.read(memory, scope.instance, self.rows.slots)
        out, new = chunked_delta_rule(q, k, v, beta, decay, self.rows.valid, old)
        state.write(memory, scope.instance, self.rows.slots, new)
        return out.reshape(node.results[0].type.shape).astype(self.dtype(node))

    def read_taps(self, op: ops_spec.ReadTaps, node: Node, memory: Memory) -> Array:
        parts = [
            self.taps[node.states[number]].read(memory, instance)
            for number, instance in zip(op.numbers, op.instances, strict=True)
        ]
        return jnp.concatenate(parts, axis=-1)

    def append(
        self, states: tuple[str, ...], names: tuple[str, ...], scope: _Scope, memory: Memory
    ) -> None:
        """Writes the rows of values [rows, heads, dim] to caches."""
        rows = self.rows
        for key, name in zip(states, names, strict=True):
            new, array = by_sequence(scope.values[name], self.graph.batch), self.states[key].array
            flat = new.reshape(*new.shape[:2], -1)
            # Lanes behind those of a row are zero.
            missing = memory[array].shape[-1] - flat.shape[-1]
            flat = jnp.pad(flat, ((0, 0), (0, 0), (0, missing)))
            memory[array] = append_rows(
                memory[array], flat, scope.instance, rows.slots, rows.starts, rows.counts
            )

    def attention(self, op: ops.Attention, node: Node, scope: _Scope, memory: Memory) -> Array:
        lanes, rows = self.graph.batch, self.rows
        self.append(node.states, node.operands[1:3], scope, memory)
        q, k = (by_sequence(scope.values[name], lanes) for name in node.operands[:2])
        kv_heads = k.shape[2]
        keys, values = (memory[self.states[key].array] for key in node.states)
        out = attend(
            q, keys, values, scope.instance, rows.slots, rows.positions, kv_heads, op.scale
        )
        return out.reshape(node.results[0].type.shape).astype(self.dtype(node))

    def latent_attention(
        self, op: ops_mixing.LatentAttention, node: Node, scope: _Scope, memory: Memory
    ) -> Array:
        lanes, rows = self.graph.batch, self.rows
        self.append(node.states, node.operands[2:4], scope, memory)
        q, shared_q = (by_sequence(scope.values[name], lanes) for name in node.operands[:2])
        up = self.weights[scope.index.matrices[node.operands[4]]]
        latents, shared_keys = (memory[self.states[key].array] for key in node.states)
        out = attend_latents(
            q,
            shared_q,
            lax.dynamic_index_in_dim(up, scope.instance, keepdims=False),
            latents,
            shared_keys,
            scope.instance,
            rows.slots,
            rows.positions,
            op.scale,
        )
        return out.reshape(node.results[0].type.shape).astype(self.dtype(node))

    def scale_heads(self, op: ShardedScaleHeads, node: Node, scope: _Scope) -> Array:
        """With the factors of this rank's heads."""
        x, factors = (self.operand(name, scope) for name in node.operands)
        first = lax.axis_index(AXIS) // op.copies * x.shape[1]
        own = lax.dynamic_slice_in_dim(wide(factors), first, x.shape[1])
        return (wide(x) * own[:, None]).astype(self.dtype(node))

    def experts(self, op: ops_experts.ExpertMlp, node: Node, scope: _Scope) -> Array:
        x, ids, weights = (scope.values[name] for name in node.operands[:3])
        use = scope.index.experts[node.operands[3:]]
        total = expert_sum(
            op,
            use,
            x,
            ids,
            weights,
            self.counted(x.shape[0]),
            gate_up=self.weights[use.plan.gate_up_array],
            down=self.weights[use.plan.down_array],
            layer=scope.instance,
        )
        return total.astype(self.dtype(node))

    def counted(self, rows: int) -> Array:
        """Which of all rows, or of the last rows of every lane, are not padding."""
        valid = self.rows.valid
        every = valid.reshape(-1)
        return every if rows == every.size else jnp.any(valid, axis=1)


def first_row(rows: tuple[int, ...], instance: Array) -> Array:
    """`rows[instance]`; which one a single row is the compiler must not know, see `run`."""
    if len(rows) == 1:
        return rows[0] + instance
    return jnp.asarray(rows, jnp.int32)[instance]


def _needed_by_states(items: Sequence[Node | Repeat]) -> tuple[int, ...]:
    """Numbers of the items that a change of a state needs; for the others the last rows do."""
    needed: list[int] = []
    read: set[str] = set()
    for number, item in reversed(list(enumerate(items))):
        if isinstance(item, Repeat):
            read |= _reads(item)
        elif item.states or read & {one.name for one in item.results}:
            read |= set(item.operands)
        else:
            continue
        needed.insert(0, number)
    return tuple(needed)


def _reads(region: Repeat) -> set[str]:
    """Values that a region reads; some are defined in it."""
    found = {carry.initial for carry in region.carries}
    for item in region.body.items:
        found |= _reads(item) if isinstance(item, Repeat) else set(item.operands)
    return found
