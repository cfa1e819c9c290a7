"""How a model file presents itself."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkc.ir.builder import Outputs
from mkc.ir.builder import trace
from mkc.ir.graph import Graph


@dataclass(frozen=True, kw_only=True)
class Model:
    """A family of models; every file under `models/` has one as `MODEL`.

    Attributes:
      name: as on the command line.
      load_config: from the contents of a Hugging Face config.json; raises `mkc.ConfigError`.
      decoder: `decoder(config, step)`, the graph of one decode step.
      default_config: config file, relative to the folder of the model file.
    """

    name: str
    load_config: Callable[[Mapping[str, Any]], Any]
    decoder: Callable[..., Outputs]
    default_config: str

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
