"""The reference evaluator: the meaning of a graph, computed with `jax.numpy`.

Every other execution of a graph is compared with it. It runs anywhere JAX does; repeat regions are
scans, so that deep models compile as fast as shallow ones.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax
from jax.typing import ArrayLike

import mkc.ir.reference_experts
import mkc.ir.reference_markov
import mkc.ir.reference_mixing
import mkc.ir.reference_spec  # noqa: F401 - they register what their ops mean
from mkc.errors import UnsupportedOpError
from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.ops import Op
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Rounding
from mkc.ir.reference_ops import storage_dtype
from mkc.ir.types import TensorType

__all__ = ["Evaluation", "OpContext", "Rounding", "compile_step", "evaluate", "initial_states"]

# XLA may otherwise keep bf16 intermediates in f32, which removes roundings that the graph asks for.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one step.

    Attributes:
      outputs: by output name: `next_token` i32 [rows], `logits` [rows, vocab].
      states: by state key, [instances, batch, ...]; feed them to the next step.
      observed: by value name, [executions, ...] in execution order.
    """

    outputs: dict[str, Array]
    states: dict[str, Array]
    observed: dict[str, Array]


# By type of op; arguments and results as in `mkc.ir.reference_ops`.
type Meanings = Mapping[type[Op], Callable[..., Any]]

NO_MEANINGS: Meanings = {}


class StepFunction(Protocol):
    """A compiled step; `inputs` are those besides tokens and positions."""

    def __call__(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        states: Mapping[str, Array],
        inputs: Mapping[str, ArrayLike] | None = None,
    ) -> Evaluation: ...


def initial_states(graph: Graph, rounding: Rounding = "reference") -> dict[str, Array]:
    """Zeros for every state: [instances, batch, ...]."""
    return {
        key: jnp.zeros(
            (state.instances, graph.batch, *state.type.shape),
            storage_dtype(state.type.dtype, rounding),
        )
        for key, state in graph.states.items()
        if state.kind is not StateKind.TAP
    }


def stack_params(
    graph: Graph, params: Mapping[str, ArrayLike], rounding: Rounding = "reference"
) -> dict[str, Array]:
    """Parameters by key from checkpoint tensors by name: [instances, ...] inside repeat regions.

    The dtype is that of the graph; a checkpoint may store another one.
    """
    stacked: dict[str, Array] = {}
    for key, param in graph.params.items():
        dtype = storage_dtype(param.type.dtype, rounding)
        wanted = param.tensor_type
        arrays = []
        for name in param.tensor_names():
            array = jnp.asarray(params[name])
            assert array.shape == wanted.shape, f"{name} is {array.shape}, not {wanted}"
            arrays.append(array.astype(dtype))
        one = jnp.stack(arrays) if param.indices or param.is_stacked else arrays[0]
        shape = (param.instances, *param.type.shape) if param.indices else param.type.shape
        stacked[key] = one.reshape(shape)
    return stacked


def compile_step(
    graph: Graph,
    params: Mapping[str, ArrayLike],
    *,
    rounding: Rounding = "reference",
    observe: Sequence[str] = (),
) -> StepFunction:
    """A compiled function `(tokens, positions, states) -> Evaluation`.

    Tokens and positions are i32 [rows]; a row with a negative position is padding.

    Args:
      params: checkpoint tensors by name.
      rounding: "reference" rounds where the graph says; "float32" keeps all numbers in f32.
      observe: names of values to return from every execution, such as the carried value of a
        repeat region (the residual stream after each layer).
    """
    weights = stack_params(graph, params, rounding)
    run = jax.jit(
        lambda weights, inputs, states: _run(graph, weights, inputs, states, rounding, observe),
        compiler_options=COMPILER_OPTIONS,
    )

    def step(
        tokens: ArrayLike,
        positions: ArrayLike,
        states: Mapping[str, Array],
        inputs: Mapping[str, ArrayLike] | None = None,
    ) -> Evaluation:
        given = {name: jnp.asarray(one) for name, one in (inputs or {}).items()}
        given |= {
            "tokens": jnp.asarray(tokens, jnp.int32),
            "positions": jnp.asarray(positions, jnp.int32),
        }
        outputs, new_states, observed = run(weights, given, dict(states))
        return Evaluation(outputs=outputs, states=new_states, observed=observed)

    return step


def step_outputs(
    graph: Graph,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    states: Mapping[str, Array],
    *,
    rounding: Rounding = "reference",
    meanings: Meanings = NO_MEANINGS,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Outputs and new states of one step, for functions that are compiled around it.

    Args:
      weights: as `stack_params` gives them.
      inputs: `tokens` and `positions`, i32 [rows].
      meanings: functions for some types of ops that compute the same in another order, such as one
        whose gradient is cheaper.
    """
    outputs, new_states, _ = _run(
        graph, dict(weights), dict(inputs), dict(states), rounding, (), meanings
    )
    return outputs, new_states


def evaluate(
    graph: Graph,
    *,
    tokens: ArrayLike,
    positions: ArrayLike,
    params: Mapping[str, ArrayLike],
    states: Mapping[str, Array],
    rounding: Rounding = "reference",
    observe: Sequence[str] = (),
) -> Evaluation:
    """One step. For several steps of one graph, `compile_step` compiles only once."""
    return compile_step(graph, params, rounding=rounding, observe=observe)(
        tokens, positions, states
    )


type Environment = dict[str, Array]  # values, unstacked parameters and states by name
type Stacks = dict[str, Array]  # parameters or states that a region indexes, by key


def _run(
    graph: Graph,
    weights: Stacks,
    inputs: Environment,
    states: Stacks,
    rounding: Rounding,
    observe: Sequence[str],
    meanings: Meanings = NO_MEANINGS,
) -> tuple[Environment, Stacks, Environment]:
    machine = _Machine(
        graph=graph,
        types=value_types(graph),
        rounding=rounding,
        observe=frozenset(observe),
        valid=inputs["positions"].reshape(graph.batch, -1) >= 0,
        meanings=meanings,
    )
    values = dict(inputs)
    stacked: Stacks = {}
    for key, param in graph.params.items():
        (stacked if param.indices else values)[key] = weights[key]
    memory: Stacks = {}
    for key, state in graph.states.items():
        stack = _tap(graph, state, rounding) if state.kind is StateKind.TAP else states[key]
        if state.indices:
            memory[key] = stack
        else:
            values[key] = stack[0]
    updated, observed = machine.block(graph.body, values, stacked | memory)
    new_states = {
        key: updated[key] if state.indices else values[key][None]
        for key, state in graph.states.items()
        if state.kind is not StateKind.TAP
    }
    outputs = {key: values[name] for key, name in graph.outputs.items()}
    shown = {
        name: array.reshape(-1, *array.shape[depth:]) for name, (depth, array) in observed.items()
    }
    assert shown.keys() == set(observe), f"no such values: {set(observe) - shown.keys()}"
    return outputs, new_states, shown


def _tap(graph: Graph, state: State, rounding: Rounding) -> Array:
    """Room for what a tap shows within the step: [instances, rows, ...]."""
    shape = (state.instances, graph.rows, *state.type.shape)
    return jnp.zeros(shape, storage_dtype(state.type.dtype, rounding))


type Observed = dict[str, tuple[int, Array]]  # how many leading axes count iterations, and values


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Runs blocks; `values` is changed in place, stacks come back."""

    graph: Graph
    types: Mapping[str, TensorType]
    rounding: Rounding
    observe: frozenset[str]
    valid: Array
    meanings: Meanings

    def block(self, block: Block, values: Environment, stacks: Stacks) -> tuple[Stacks, Observed]:
        """Runs a block: the stacks that its regions changed, and the observed values."""
        changed: Stacks = {}
        observed: Observed = {}
        for item in block.items:
            if isinstance(item, Repeat):
                new, seen = self.region(item, values, stacks | changed)
                changed |= new
                observed |= seen
            else:
                if item.op.whole_states:
                    values |= self.whole(item.states, values, stacks | changed)
                self.node(item, values)
                names = (result.name for result in item.results)
                observed |= {one: (0, values[one]) for one in names if one in self.observe}
        return changed, observed

    def whole(self, keys: Sequence[str], values: Environment, stacks: Stacks) -> Environment:
        """States with all their instances, for an op that reads them."""
        indexed = {key: self.graph.states[key].indices for key in keys}
        return {key: stacks[key] if indexed[key] else values[key][None] for key in keys}

    def node(self, node: Node, values: Environment) -> None:
        function = self.meanings.get(type(node.op)) or REFERENCE.find(node.op)
        if function is None:
            raise UnsupportedOpError(
                op=node.op.mnemonic, facet=REFERENCE.name, location=node.location
            )
        context = OpContext(
            rounding=self.rounding,
            operand_types=tuple(self.types[name] for name in node.operands),
            result_types=tuple(result.type for result in node.results),
            valid=self.valid,
        )
        results, states = function(
            node.op,
            tuple(values[name] for name in node.operands),
            tuple(values[key] for key in node.states),
            context,
        )
        for result, array in zip(node.results, results, strict=True):
            assert array.shape == result.type.shape, f"%{result.name} is {array.shape}"
            values[result.name] = array
        for key, array in zip(node.states, states, strict=True):
            values[key] = array.astype(values[key].dtype)

    def region(
        self, region: Repeat, values: Environment, stacks: Stacks
    ) -> tuple[Stacks, Observed]:
        used = _stacked_keys(region.body, self.graph)
        inner = {key: _outer_axis(stacks[key], region.count) for key in used}
        state_keys = [key for key in used if key in self.graph.states]
        depths: dict[str, int] = {}

        def body(carried: tuple[Array, ...], slices: Stacks) -> tuple[Any, Any]:
            local = dict(values)
            for carry, array in zip(region.carries, carried, strict=True):
                local[carry.argument.name] = array
            # What the body's own nodes use has one instance left per execution here.
            direct = _direct_keys(region.body)
            deeper = {}
            for key, array in slices.items():
                if key in direct:
                    local[key] = array[0]
                else:
                    deeper[key] = array
            changed, seen = self.block(region.body, local, deeper)
            new = {key: local[key][None] if key in direct else changed[key] for key in state_keys}
            depths.update({name: depth for name, (depth, _) in seen.items()})
            yielded = tuple(local[carry.yielded] for carry in region.carries)
            return yielded, (new, {name: array for name, (_, array) in seen.items()})

        initial = tuple(values[carry.initial] for carry in region.carries)
        final, (new, seen) = lax.scan(body, initial, inner, length=region.count)
        for carry, array in zip(region.carries, final, strict=True):
            values[carry.result.name] = array
        changed = {key: array.reshape(-1, *array.shape[2:]) for key, array in new.items()}
        return changed, {name: (depths[name] + 1, array) for name, array in seen.items()}


def _outer_axis(stack: Array, count: int) -> Array:
    """[instances, ...] -> [count, instances per iteration, ...]."""
    return stack.reshape(count, stack.shape[0] // count, *stack.shape[1:])


def _direct_keys(block: Block) -> set[str]:
    """Names that the block's own nodes use, regions left out."""
    nodes = [item for item in block.items if isinstance(item, Node)]
    return {name for node in nodes for name in (*node.operands, *node.states)}


def _stacked_keys(block: Block, graph: Graph) -> list[str]:
    """Keys with instances per execution, in order of use."""
    found: dict[str, None] = {}
    for node in block.nodes():
        for name in (*node.operands, *node.states):
            owner: Param | State | None = graph.params.get(name) or graph.states.get(name)
            if owner is not None and owner.indices:
                found[name] = None
    return list(found)


def value_types(graph: Graph) -> dict[str, TensorType]:
    """Type of every value, parameter and state."""
    types = {value.name: value.type for value in graph.inputs}
    types |= {key: param.type for key, param in graph.params.items()}
    types |= {key: state.type for key, state in graph.states.items()}

    def visit(block: Block) -> None:
        for item in block.items:
            if isinstance(item, Repeat):
                for carry in item.carries:
                    types[carry.argument.name] = carry.argument.type
                    types[carry.result.name] = carry.result.type
                visit(item.body)
            else:
                types.update({result.name: result.type for result in item.results})

    visit(graph.body)
    return types
