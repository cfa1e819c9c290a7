"""What mixtures of experts do with their matrices, as events; part of `protocol`.

Which experts are chosen depends on data. As many as the rank may have to read at most are loaded
here, the first ones; where no sequence is awake none are. Fewer leave out loads and their waits at
the end of the list, both alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.verify.events import Place

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel


def most_chosen(plan: ExpertPlan, ring: ExpertRing) -> int:
    """Experts of one layer that a rank reads at most."""
    return min(plan.local, ring.rows * ring.chosen)


@dataclass(kw_only=True)
class ExpertCursor:
    """Where a mixture stands.

    Attributes:
      entry: the expert to compute next, all layers counted through.
      slot: where its matrices are.
      end: behind the last expert that is computed in the layer; between layers, in all of them.
    """

    plan: ExpertPlan
    ring: ExpertRing
    entry: int = 0
    slot: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        self.go_to(0)

    def go_to(self, layer: int) -> None:
        """The first expert of a layer is next."""
        self.entry, self.slot = layer * self.plan.local, 0
        self.end = self.plan.layers * self.plan.local

    @property
    def layer(self) -> int:
        return self.entry // self.plan.local


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of one rank on their way through the ring."""

    kernel: Kernel

    def route(self, phase: RoutePhase) -> None:
        kernel, cursor = self.kernel, self.kernel.experts[phase.experts]
        name = cursor.ring.name
        kernel.load("route", phase.logits)
        if phase.bias:
            kernel.stream_read("route", kernel.streams[phase.page])
        scores = Place(array=f"{name}_scores")
        if cursor.ring.has_scores:
            kernel.write("route", scores)
            kernel.read("route", scores)
        kernel.write("route", Place(array=f"{name}_landing"))
        kernel.store("route", phase.ids)
        kernel.store("route", phase.weights)
        landing, chosen = Place(array=f"{name}_landing"), Place(array=f"{name}_chosen")
        kernel.start("route", landing, chosen, (f"{name}_sem", (0,)))
        kernel.wait("route", (f"{name}_sem", (0,)), kernel.size(landing))
        for number in range(min(cursor.ring.slots, self.chosen(cursor))):
            self.start("experts_start", cursor, cursor.entry + number, number)

    def chosen(self, cursor: ExpertCursor) -> int:
        awake = any(position >= 0 for position in self.kernel.positions)
        return most_chosen(cursor.plan, cursor.ring) if awake else 0

    def start(self, routine: str, cursor: ExpertCursor, entry: int, slot: int) -> None:
        plan, name = cursor.plan, cursor.ring.name
        for array, suffix in ((plan.gate_up_array, "gate_up"), (plan.down_array, "down")):
            self.kernel.start(
                routine,
                Place(array=array, index=(entry,)),
                Place(array=f"{name}_{suffix}", index=(slot,)),
                (f"{name}_arrived", (slot,)),
            )

    def compute(self, phase: ExpertsPhase) -> None:
        """A loop over the experts, whose second product is that of the expert before; what comes in
        while one is computed takes the place of the one before it."""
        kernel, cursor = self.kernel, self.kernel.experts[phase.experts]
        kernel.load("expert_mlp", phase.x)
        left = Place(array=f"{cursor.ring.name}_left")
        if left.array in kernel.arrays:
            kernel.write("expert_mlp", left)
        kernel.read("expert_mlp", Place(array=f"{cursor.ring.name}_chosen"))
        kernel.store("expert_mlp", phase.output)
        layer, chosen, slots = cursor.layer, self.chosen(cursor), cursor.ring.slots
        cursor.end = cursor.entry + chosen
        kernel.sink.enter(f"experts of {phase.id}", chosen)
        number = 0
        while number < chosen:
            number += kernel.sink.border(number)
            self.first_product(cursor)
            behind = min(number, 1)  # the first one has none before it: its own matrix is read
            before = (cursor.slot - behind) % slots
            self.second_product(phase, cursor, cursor.entry - behind, before)
            if number > 0 and number - 1 + slots < chosen:
                self.start("expert_mlp", cursor, cursor.entry - 1 + slots, before)
            cursor.entry, cursor.slot = cursor.entry + 1, (cursor.slot + 1) % slots
            number += 1
        kernel.sink.leave()
        if chosen:
            self.second_product(phase, cursor, cursor.entry - 1, (cursor.slot - 1) % slots)
        cursor.go_to(layer + 1)

    def first_product(self, cursor: ExpertCursor) -> None:
        """With the matrices of both factors, when the expert has come in."""
        kernel, plan, name = self.kernel, cursor.plan, cursor.ring.name
        for suffix in ("gate_up", "down"):
            place = Place(array=f"{name}_{suffix}", index=(cursor.slot,))
            semaphore = (f"{name}_arrived", (cursor.slot,))
            kernel.wait("expert_mlp", semaphore, kernel.size(place))
        place = Place(array=f"{name}_gate_up", index=(cursor.slot,))
        kernel.read("expert_mlp", place, Place(array=plan.gate_up_array, index=(cursor.entry,)))
        if f"{name}_left" in kernel.arrays:
            kernel.read("expert_mlp", Place(array=f"{name}_left"))

    def second_product(
        self, phase: ExpertsPhase, cursor: ExpertCursor, entry: int, slot: int
    ) -> None:
        """What an expert gives is added to the output."""
        kernel = self.kernel
        place = Place(array=f"{cursor.ring.name}_down", index=(slot,))
        kernel.read("expert_mlp", place, Place(array=cursor.plan.down_array, index=(entry,)))
        for view in (phase.ids, phase.weights):
            kernel.load("expert_mlp", view)
        kernel.store_row("expert_mlp", phase.output)
