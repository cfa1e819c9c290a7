"""Which kernel is to run a model, and on what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mkc.driver import choose_topology
from mkc.ir.graph import Graph
from mkc.runtime.backends import BackendName
from mkc.targets import Target


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """What the user named.

    Attributes:
      name: `tpu` or `interpret`.
      target: GENERATION or GENERATION:TOPOLOGY.
      tp: ranks; None for all devices on TPUs, 1 when interpreted.
      packed: folder that `mkc pack` wrote, None to pack on the fly.
      say: is told, before anything is loaded, what each device will hold.
    """

    name: BackendName
    target: str
    tp: int | None
    packed: Path | None
    say: Callable[[str], None]

    def place(self, graph: Graph) -> tuple[Target, int]:
        """The target with a topology for the graph, and the number of ranks. Raises `MkcError`."""
        tp = self.tp or (1 if self.name == "interpret" else None)
        found = choose_topology(graph, self.target, tp)
        assert found.topology is not None
        return found, tp or found.topology.devices
