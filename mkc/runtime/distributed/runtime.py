"""A thin layer over `jax.distributed`: how a process joins the others, and how it leaves them.

JAX starts a coordinator in process 0, and every process reports to it. When a process stops
reporting, JAX ends all others (with SIGABRT, wherever they are blocked); a process that sees an
error of a collective first ends itself with the status `RESTART`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any
from typing import NoReturn

import jax
import numpy as np
from jax._src import distributed  # the only place where JAX has its client
from jax.experimental import multihost_utils

from mkc.errors import CoordinatorError
from mkc.errors import LauncherError
from mkc.errors import MkcError
from mkc.errors import ProcessesDifferError
from mkc.errors import ProcessOptionError

RESTART = 75  # exit status EX_TEMPFAIL: start all processes again
HEARTBEAT_SECONDS = 10  # without a sign of life a process counts as dead
SHUTDOWN_SECONDS = 10  # how long a process that ends waits for the others
START_SECONDS = 300  # how long a process waits for the others to come up
GRACE_SECONDS = 60  # JAX would end the process without saying what is missing


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a process joins the others: by all three attributes, or by what its launcher says.

    Attributes:
      coordinator: `HOST:PORT` of process 0.
      processes: how many there are.
      process: the number of this one.
      timeout: seconds to wait for the others.

    Raises:
      ProcessOptionError: only some are given, or one is out of its range.
    """

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: int = START_SECONDS

    def __post_init__(self) -> None:
        given = {
            "--coordinator": self.coordinator,
            "--processes": self.processes,
            "--process": self.process,
        }
        absent = [name for name, value in given.items() if value is None]
        if absent and len(absent) < len(given):
            raise ProcessOptionError(
                problem=f"{', '.join(sorted(given.keys() - absent))} without {', '.join(absent)}",
                expected="all three of them or none",
                hint="Say all three, or none for what the launcher says",
            )
        if self.coordinator is not None:
            _check_address(self.coordinator)
        if self.processes is not None and self.process is not None:
            _check_numbers(self.processes, self.process)
        if self.timeout < 1:
            raise ProcessOptionError(
                problem=f"a start timeout of {self.timeout} s",
                expected="at least 1 s",
                hint="Correct --start-timeout",
            )

    @property
    def explicit(self) -> bool:
        return self.coordinator is not None


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ProcessOptionError(
            problem=f"the coordinator is '{address}'",
            expected="HOST:PORT with a port from 1 to 65535",
            hint="Name the host of process 0 and a port that is free there",
        )


def _check_numbers(processes: int, process: int) -> None:
    if processes < 1 or not 0 <= process < processes:
        raise ProcessOptionError(
            problem=f"process {process} of {processes}",
            expected="at least one process, numbered from 0 to one less than --processes",
            hint="Correct --processes or --process",
        )


def join(launch: Launch) -> None:
    """Starts JAX's multi-controller runtime; before anything else runs on a device.

    Ends the process with the status `RESTART` when the others do not come up in time.

    Raises:
      LauncherError: nothing says where the others are.
      CoordinatorError: process 0 cannot listen.
      ProcessesDifferError: the processes disagree about how many they are.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Otherwise JAX takes SIGTERM for a notice to checkpoint, and the process lives on.
    jax.config.update("jax_enable_preemption_service", False)
    where = launch.coordinator or "of the launcher"
    late = CoordinatorError(
        where=where,
        problem=f"cannot be reached, or some processes did not come up within {launch.timeout} s",
        hint="Look whether all processes run and whether a firewall closes the port, "
        "or raise --start-timeout",
    )
    timer = Timer(launch.timeout, leave, [late])
    timer.daemon = True
    timer.start()
    try:
        with _stdout_as_stderr():
            _initialize(launch, where)
            agree("number of processes", str(distributed.global_state.num_processes))
            # Connects all processes, which with Gloo prints to stdout.
            multihost_utils.broadcast_one_to_all(np.zeros(1, np.int32))
    finally:
        timer.cancel()


def _initialize(launch: Launch, where: str) -> None:
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            cluster_detection_method="deactivate" if launch.explicit else None,
            initialization_timeout=launch.timeout + GRACE_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except jax.errors.JaxRuntimeError as error:
        raise CoordinatorError(
            where=where,
            problem=f"process 0 cannot listen there ({first_line(error)})",
            hint="Choose a port that no other program uses",
        ) from error
    except ValueError as error:  # nothing was detected
        raise LauncherError(problem="no launcher is detected") from error
    except (RuntimeError, KeyError) as error:
        raise LauncherError(problem=f"the launcher's values are no use ({error})") from error


def agree(what: str, value: str) -> None:
    """Compares a value with that of process 0.

    Raises:
      ProcessesDifferError: here it is another one.
    """
    key = f"mkc/{what}"
    if is_leader():
        client().key_value_set(key, value)
        return
    expected = client().blocking_key_value_get(key, START_SECONDS * 1000)
    if expected != value:
        raise ProcessesDifferError(
            what=what, process=jax.process_index(), got=value, expected=expected
        )


def is_leader() -> bool:
    """Whether this is process 0, or the only one."""
    return bool(distributed.global_state.process_id == 0)


def client() -> Any:
    """JAX's client of its coordinator: keys and values, barriers."""
    found = distributed.global_state.client
    assert found is not None, "this process has not joined others"
    return found


def leave(error: MkcError) -> NoReturn:
    """Ends this process at once, whatever its threads do, so that the launcher can start again."""
    print(error.report(), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(RESTART)


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's name when there is none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """What libraries print to stdout appears on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
