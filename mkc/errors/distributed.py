"""Several processes that do not find each other, do not agree, or lose each other."""

from __future__ import annotations

from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import sentence


class ProcessOptionError(MkcError):
    """Options about processes that contradict each other or are out of their range."""

    code: ClassVar[str] = "E350"

    def __init__(self, *, problem: str, expected: str, hint: str) -> None:
        super().__init__(f"{problem}; expected {expected}. {sentence(hint)}")


class LauncherError(MkcError):
    """No launcher says how many processes there are, or what it says cannot be used."""

    code: ClassVar[str] = "E351"

    def __init__(self, *, problem: str) -> None:
        super().__init__(
            f"--distributed: {problem}; expected the environment of Slurm, Open MPI, Kubernetes or "
            f"a TPU slice. Start mkc with one of these launchers, or say --coordinator HOST:PORT "
            f"--processes N --process I."
        )


class CoordinatorError(MkcError):
    """The processes did not come together in time, or the coordinator cannot listen."""

    code: ClassVar[str] = "E352"

    def __init__(self, *, where: str, problem: str, hint: str) -> None:
        super().__init__(
            f"coordinator {where}: {problem}; expected all processes to meet there. "
            f"{sentence(hint)}"
        )


class ProcessesDifferError(MkcError):
    """Processes of one job that were started with different options."""

    code: ClassVar[str] = "E353"

    def __init__(self, *, what: str, process: int, got: str, expected: str) -> None:
        super().__init__(
            f"process {process} has another {what} than process 0: {got}; expected {expected}. "
            f"Start all processes with the same command and the same files."
        )


class ProcessLostError(MkcError):
    """A process failed, or one that it works with did; none of them can go on."""

    code: ClassVar[str] = "E354"

    def __init__(self, *, process: int, processes: int, problem: str) -> None:
        super().__init__(
            f"process {process} of {processes} cannot go on: {problem}; expected all processes to "
            f"run until process 0 ends them. Look for the first message of the other processes, "
            f"and start all of them again."
        )
