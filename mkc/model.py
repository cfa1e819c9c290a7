"""How a model file presents itself."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkc.ir.builder import Outputs
from mkc.ir.builder import trace
from mkc.ir.draft import ContextStep
from mkc.ir.draft import Drafts
from mkc.ir.draft import DraftStep
from mkc.ir.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Model:
    """A family of models; every file under `models/` has one as `MODEL`.

    Attributes:
      name: as on the command line.
      load_config: from the contents of a Hugging Face config.json; raises `mkc.ConfigError`.
      decoder: `decoder(config, step)`, the graph of one decode step.
      default_config: config file, relative to the folder of the model file.
      small_config: one of the same structure, of a size that is run where there is no TPU; empty
        where there is none.
    """

    name: str
    load_config: Callable[[Mapping[str, Any]], Any]
    decoder: Callable[..., Outputs]
    default_config: str
    small_config: str = ""

    def trace(
        self, config: Mapping[str, Any], *, batch: int, context: int, rows_per_sequence: int = 1
    ) -> Graph:
        """Graph of one step for the contents of a config.json; see `mkc.trace`."""
        return trace(
            self.decoder,
            name=self.name,
            batch=batch,
            context=context,
            config=self.load_config(config),
            rows_per_sequence=rows_per_sequence,
        )


@dataclass(frozen=True, kw_only=True)
class DraftForm:
    """What a drafter needs of a target and of a round.

    Attributes:
      tap: name that the target shows its layers under.
      layers: the layers of the target that the drafter looks at, in order.
      rows: of a block: the anchor and the drafts behind it.
      candidates: tokens that each draft is drawn from; 0 where drafts are certain.
      hidden, vocab: those of the target.
      max_positions: that the drafter was made for.
    """

    tap: str
    layers: tuple[int, ...]
    rows: int
    candidates: int
    hidden: int
    vocab: int
    max_positions: int


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A family of block drafters; their file under `models/` has one as `DRAFTER`.

    Attributes:
      name: as on the command line.
      load_config: from the contents of a Hugging Face config.json; raises `mkc.ConfigError`.
      form: `form(config)`.
      remember: `remember(config, step)`: verified rows enter the drafter's caches.
      propose: `propose(config, step)`: remembers `step.remembered`, and fills a block.
      default_config: config file, relative to the folder of the drafter's file.
      small_config: a drafter for small configs of models, as for `Model`.
    """

    name: str
    load_config: Callable[[Mapping[str, Any]], Any]
    form: Callable[[Any], DraftForm]
    remember: Callable[[Any, ContextStep], None]
    propose: Callable[[Any, DraftStep], Drafts]
    default_config: str
    small_config: str = ""
