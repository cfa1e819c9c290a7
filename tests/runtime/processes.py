"""Real processes of one job on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from subprocess import PIPE
from subprocess import Popen
from time import monotonic
from time import sleep

ROOT = Path(__file__).parents[2]
START_SECONDS = 600  # an upper bound for a busy machine; a few on an idle one
JAX_ENDED_IT = -6  # SIGABRT, from JAX's own health check


@dataclass(frozen=True, kw_only=True)
class Job:
    """Attributes:
    processes: by number.
    folder: where their output goes.
    """

    processes: list[Popen[str]]
    folder: Path

    def stdout(self, number: int) -> str:
        return (self.folder / f"{number}.out").read_text()

    def stderr(self, number: int) -> str:
        return (self.folder / f"{number}.err").read_text()

    def wait(self, timeout: float) -> list[int]:
        """Exit statuses of all processes, which must end by themselves in time."""
        end = monotonic() + timeout
        return [one.wait(max(0.1, end - monotonic())) for one in self.processes]

    def wait_for(self, number: int, text: str, timeout: float = START_SECONDS) -> None:
        """Waits until a process has said something on stderr."""
        end = monotonic() + timeout
        while text not in self.stderr(number):
            assert self.processes[number].poll() is None, self.stderr(number)
            assert monotonic() < end, f"no {text!r} in: {self.stderr(number)}"
            sleep(0.1)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def job(folder: Path, commands: list[list[str]]) -> Iterator[Job]:
    """Starts `python -m ...` for each command; nothing is left running behind the block.

    Compiled programs are shared by all jobs with the same parent folder.
    """
    folder.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if "XLA" not in name}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(ROOT),
    }
    processes = []
    try:
        for number, command in enumerate(commands):
            with (
                open(folder / f"{number}.out", "w") as out,
                open(folder / f"{number}.err", "w") as err,
            ):
                processes.append(
                    Popen(
                        [sys.executable, "-m", *command],
                        stdin=PIPE if number == 0 else DEVNULL,
                        stdout=out,
                        stderr=err,
                        env=environment,
                        text=True,
                    )
                )
        yield Job(processes=processes, folder=folder)
    finally:
        for one in processes:
            one.kill()
            one.wait()
            if one.stdin is not None:
                one.stdin.close()


def joining(port: int, processes: int, process: int) -> list[str]:
    """Options of `mkc` for one of several processes."""
    return (
        f"--distributed --coordinator localhost:{port} --processes {processes} "
        f"--process {process} --start-timeout {START_SECONDS}"
    ).split()
