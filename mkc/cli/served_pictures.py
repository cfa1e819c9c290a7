"""Pictures of a running kernel, for the page of a server."""

from __future__ import annotations

from functools import cached_property
from json import dumps
from json import loads
from pathlib import Path

from mkc.cli.kernel_choice import KernelChoice
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.pipeline import Lowered
from mkc.plan.folder import PlanFolder
from mkc.report import plan_document
from mkc.report import report_document
from mkc.runtime.backends import Backend
from mkc.runtime.backends.kernel import KernelBackend
from mkc.schedule.simulate import predict
from mkc.schedule.verify import prove
from mkc.targets import Target
from mkc.viz.predict import subject_of
from mkc.viz.timeline import timeline_document
from mkc.viz.timeline import timeline_html
from mkc.viz.vmem import vmem_document
from mkc.viz.vmem import vmem_html

SECONDS = {"passes": 0.0, "aot": 0.0}  # of a compilation, which is not looked at here


class KernelPictures:
    """Timeline and VMEM map of the kernel that runs, drawn when they are first asked for.

    Attributes:
      names: of the pictures.
    """

    names = ("timeline.html", "vmem.html")

    def __init__(self, lowered: Lowered, target: Target) -> None:
        self._lowered = lowered
        self._target = target

    def draw(self) -> dict[str, bytes]:
        """All pictures by name; each is a page of its own."""
        return self._drawn

    @cached_property
    def _drawn(self) -> dict[str, bytes]:
        subject = subject_of(self._folder())
        pages = (
            timeline_html(timeline_document(subject)),
            vmem_html(vmem_document(subject)),
        )
        return {name: text.encode() for name, text in zip(self.names, pages, strict=True)}

    def _folder(self) -> PlanFolder:
        """What `mkc compile` would write of this kernel."""
        lowered, target = self._lowered, self._target
        program = lowered.program
        plan = plan_document(lowered, target, cycles={})
        report = report_document(
            lowered,
            target,
            None,
            SECONDS,
            predicted=predict(program, target, cycles={}),
            proof=prove([program] * program.ranks, target),
            plan=plan,
        )
        return PlanFolder(
            path=Path("plan"),
            plan=loads(dumps(plan)),
            report=loads(dumps(report)),
            kernel_source=kernel_source(program, lowered.steps, target=target),
        )


def pictures_of(backend: Backend, choice: KernelChoice | None) -> KernelPictures | None:
    """Pictures of what a backend runs; None when that is no kernel of this process alone."""
    if choice is None or not isinstance(backend, KernelBackend):
        return None
    lowered = backend.session.lowered
    target, _ = choice.place(lowered.steps.sharded.full)
    return KernelPictures(lowered, target)
