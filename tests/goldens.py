"""Golden cases: the expected tensors of `tests/data/goldens` and the graphs they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mkc import Graph
from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops import Binary
from mkc.ir.ops import Embed
from mkc.ir.ops import Linear
from models.qwen38 import MODEL
from tests.generate_weights import weights

FOLDER = Path(__file__).parent / "data" / "goldens"
CASES = ("qwen38_mini", "qwen38_lane")
CONTEXT = 128  # holds the 48 prompt tokens and the 64 that follow


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One case.

    Attributes:
      meta: contents of meta.json.
      expected: tensors by name, see `meta["tensors"]`.
    """

    name: str
    meta: Mapping[str, Any]
    expected: Mapping[str, NDArray[Any]]

    @property
    def tolerances(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self.meta["suggested_tolerances"]
        return found

    def graph(self, *, batch: int = 1, context: int = CONTEXT) -> Graph:
        return MODEL.trace(self.meta["config"], batch=batch, context=context)

    def weights(self) -> Mapping[str, NDArray[Any]]:
        return _weights(self.name)


@cache
def golden_case(name: str) -> Golden:
    """A case by name."""
    folder = FOLDER / name
    return Golden(
        name=name,
        meta=loads((folder / "meta.json").read_text()),
        expected=load_file(folder / "expected.safetensors"),
    )


@cache
def _weights(name: str) -> Mapping[str, NDArray[Any]]:
    case = golden_case(name)
    return weights(case.graph(), case.meta["seed"])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value of one layer is: name in the graph, and which of its executions."""

    name: str
    execution: int


def residual_places(graph: Graph) -> list[Place]:
    """The residual stream: the embedding, then what every layer leaves behind."""
    embedded = next(node for node in graph.body.nodes() if isinstance(node.op, Embed))
    found: dict[int, Place] = {}
    for nodes in _node_runs(graph.body):
        down = {
            node.results[0].name: node.operands[1]
            for node in nodes
            if isinstance(node.op, Linear) and "down_proj" in node.operands[1]
        }
        for node in nodes:
            if isinstance(node.op, Binary) and node.operands[1] in down:
                param = graph.params[down[node.operands[1]]]
                layers = param.indices or (int(param.pattern.split("layers.")[1].split(".")[0]),)
                for execution, layer in enumerate(layers):
                    found[layer] = Place(name=node.results[0].name, execution=execution)
    places = [Place(name=embedded.results[0].name, execution=0)]
    return places + [found[layer] for layer in sorted(found)]


def _node_runs(block: Block) -> list[list[Node]]:
    """The nodes of every block, without those of inner regions."""
    runs = [[item for item in block.items if isinstance(item, Node)]]
    for item in block.items:
        if isinstance(item, Repeat):
            runs += _node_runs(item.body)
    return runs


def layer_state(graph: Graph, states: Mapping[str, Any], layer: int, name: str) -> NDArray[Any]:
    """State `name` of one layer: [batch, ...] as f32."""
    for key, state in graph.states.items():
        if state.pattern.endswith(name):
            if layer in state.indices:
                return np.asarray(states[key][state.indices.index(layer)], np.float32)
            if f"layers.{layer}." in state.pattern:
                return np.asarray(states[key][0], np.float32)
    raise KeyError(f"layer {layer} has no state {name}")
