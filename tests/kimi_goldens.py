"""The golden Kimi K3 cases: expected tensors, and runs that show the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from json import loads
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mkc import Graph
from mkc.ir.builder import Trace
from mkc.ir.builder import apply
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.cache_form import with_cache_form
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.reference import Rounding
from mkc.ir.reference import StepFunction
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.spec.scheme import step_of
from mkc.spec.taps import connect
from models.kimi_k3 import MODEL
from tests.goldens import CONTEXT
from tests.goldens import FOLDER
from tests.goldens import Golden
from tests.goldens import layer_state
from tests.kimi_weights import kimi_weights

KIMI_CASES = ("kimi_k3_mini", "kimi_k3_mini_mxfp4")
PADDING = -1


class KimiGolden(Golden):
    """A case of this family."""

    @property
    def config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.meta["config"]
        return found

    def graph(self, *, batch: int = 1, context: int = CONTEXT) -> Graph:
        return MODEL.trace(self.config, batch=batch, context=context)

    def weights(self) -> Mapping[str, NDArray[Any]]:
        return _weights(self.name)


@cache
def kimi_case(name: str) -> KimiGolden:
    """A case by name."""
    folder = FOLDER / name
    return KimiGolden(
        name=name,
        meta=loads((folder / "meta.json").read_text()),
        expected=load_file(folder / "expected.safetensors"),
    )


@cache
def _weights(name: str) -> Mapping[str, NDArray[Any]]:
    case = kimi_case(name)
    heads = case.config["text_config"]["num_attention_heads"]
    return kimi_weights(case.graph(), case.meta["seed"], heads=heads)


def observed_graph(config: Mapping[str, Any], rows: int) -> Graph:
    """A step of `rows` tokens with more outputs: `taps`, the stream entering every layer side by
    side, `last`, that leaving the last one, and `blocks`, the stored vectors."""
    loaded = MODEL.load_config(config)
    record = Trace(name="kimi_k3", rows=rows, batch=1, context=CONTEXT, taps=True)
    layers = tuple(range(len(loaded.full)))
    with recording(record):
        outputs = MODEL.decoder(loaded, step_of(record))
        op = ReadTaps(name="input", layers=layers, width=loaded.hidden)
        (taps,) = apply(op, record.inputs["positions"])
    shown = {"next_token": outputs.next_token, "logits": outputs.logits, "taps": taps}
    graph = connect(build(record, shown), drafter="the test")
    *_, final = (node for node in graph.body.nodes() if isinstance(node.op, MixBlocks))
    more = {"blocks": final.operands[0], "last": final.operands[2]}
    return replace(graph, outputs=graph.outputs | more)


@dataclass(frozen=True, kw_only=True)
class KimiRun:
    """A step of several tokens.

    Attributes:
      logits: f32 [rows, vocab].
      residual: f32 [layers + 1, rows, hidden].
      blocks: f32 [rows, slots, hidden].
      states: after it.
    """

    logits: NDArray[np.float32]
    residual: NDArray[np.float32]
    blocks: NDArray[np.float32]
    states: Mapping[str, Any]


class KimiPlayer:
    """Runs steps of one case, compiled once for each number of rows.

    Args:
      changes: of the text config.
    """

    def __init__(
        self,
        name: str,
        rounding: Rounding,
        *,
        form: CacheForm = CacheForm.LATENT,
        weights: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.case = kimi_case(name)
        text = {**self.case.config["text_config"], **changes}
        self.config = {**self.case.config, "text_config": text}
        self.rounding = rounding
        self.form = form
        self.weights = self.case.weights() if weights is None else weights
        self._steps: dict[int, tuple[Graph, StepFunction]] = {}

    def graph(self, rows: int) -> Graph:
        return self._compiled(rows)[0]

    def _compiled(self, rows: int) -> tuple[Graph, StepFunction]:
        if rows not in self._steps:
            graph = with_cache_form(observed_graph(self.config, rows), self.form)
            self._steps[rows] = graph, compile_step(graph, self.weights, rounding=self.rounding)
        return self._steps[rows]

    def empty(self) -> Mapping[str, Any]:
        return initial_states(self.graph(1), self.rounding)

    def run(
        self, tokens: Sequence[int], start: int, states: Mapping[str, Any], *, count: int = 0
    ) -> KimiRun:
        """Feeds `tokens` from position `start` on; with `count` only that many, behind padding."""
        _, step = self._compiled(len(tokens))
        places = start + np.arange(len(tokens))
        places[count or len(tokens) :] = PADDING
        found = step(np.asarray(tokens), places, states)
        parts = {key: np.asarray(one, np.float32) for key, one in found.outputs.items()}
        last = parts["last"]
        entering = parts["taps"].reshape(len(tokens), -1, last.shape[1])
        return KimiRun(
            logits=parts["logits"],
            residual=np.concatenate([entering, last[:, None]], axis=1).transpose(1, 0, 2),
            blocks=parts["blocks"],
            states=found.states,
        )

    def state(self, states: Mapping[str, Any], layer: int, name: str) -> NDArray[Any]:
        """A state of one layer as the goldens have it."""

        def of(state: str) -> NDArray[Any]:
            one: NDArray[Any] = layer_state(self.graph(1), states, layer, f"self_attn.{state}")[0]
            return one

        if name == "conv":
            return np.concatenate([of(f"{one}_conv") for one in "qkv"], axis=-1)
        if name == "recurrent":
            return of(name)
        cached: NDArray[Any] = of(f"kv.{name}")[:, 0]
        return cached


@cache
def kimi_player(name: str, rounding: Rounding) -> KimiPlayer:
    """The case as it is."""
    return KimiPlayer(name, rounding)
