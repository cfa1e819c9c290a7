"""Several processes: options, launchers, and processes that do not agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mkc.errors import BackendError
from mkc.errors import CoordinatorError
from mkc.errors import LauncherError
from mkc.errors import ProcessesDifferError
from mkc.errors import ProcessLostError
from mkc.errors import ProcessOptionError
from mkc.runtime import distributed
from mkc.runtime.backends import opening
from mkc.runtime.distributed import Launch
from mkc.runtime.distributed import runtime
from mkc.targets import load_target
from tests.errors.command import Command
from tests.errors.expect import refused

LAUNCHED = "--distributed --coordinator localhost:1234"


def test_some_options_without_the_others(command: Command) -> None:
    command.refused(
        ProcessOptionError,
        "--coordinator without --processes, --process",
        "all three",
        argv=f"run -p hello {LAUNCHED}",
    )


def test_numbers_that_contradict_each_other(command: Command) -> None:
    command.refused(
        ProcessOptionError,
        "process 2 of 2",
        "from 0 to one less",
        "Correct",
        argv=f"run -p hello {LAUNCHED} --processes 2 --process 2",
    )


def test_options_without_distributed(command: Command) -> None:
    command.refused(
        ProcessOptionError,
        "without --distributed",
        "Add --distributed",
        argv="chat --coordinator localhost:1234 --processes 2 --process 0",
    )


def test_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX finds nothing in the environment of the tests."""
    monkeypatch.setattr(runtime.jax.distributed, "initialize", nothing_detected)
    with refused(LauncherError, "no launcher is detected", "Slurm", "--coordinator HOST:PORT"):
        runtime._initialize(Launch(), "of the launcher")


def nothing_detected(*arguments: object, **options: object) -> None:
    raise ValueError("coordinator_address should be defined.")


def test_a_coordinator_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_use(*arguments: object, **options: object) -> None:
        raise runtime.jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(runtime.jax.distributed, "initialize", in_use)
    launch = Launch(coordinator="localhost:1234", processes=2, process=0)
    with refused(CoordinatorError, "localhost:1234", "cannot listen", "Choose a port"):
        runtime._initialize(launch, "localhost:1234")


def test_processes_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def blocking_key_value_get(self, key: str, timeout: int) -> str:
            return "context 64"

    monkeypatch.setattr(runtime, "client", Client)
    monkeypatch.setattr(runtime, "is_leader", lambda: False)
    with refused(ProcessesDifferError, "another model", "context 32", "context 64", "same command"):
        distributed.agree("model", "context 32")


def test_a_lost_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends at once, with the status that means: start again."""
    ended = []
    monkeypatch.setattr(runtime.os, "_exit", ended.append)
    distributed.leave(ProcessLostError(process=1, processes=4, problem="Connection closed by peer"))
    assert ended == [75]
    printed = capsys.readouterr().err
    assert printed.startswith("error[E354]: process 1 of 4 cannot go on: Connection closed by peer")
    assert "start all of them again" in printed


def test_backends_that_processes_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening.jax, "process_count", lambda: 4)
    with refused(BackendError, "one process, and there are 4", "--backend reference"):
        opening._cpu_devices(1)
    target = load_target("tpu7x:2x2x1")
    tpu = SimpleNamespace(platform="tpu", device_kind=target.device_kind)
    monkeypatch.setattr(opening.jax, "devices", lambda: [tpu] * 32)
    with refused(BackendError, "4 processes have 32 TPUs", "8 ranks", "Choose --tp 32"):
        opening._tpu_devices(target, 8)
    assert len(opening._tpu_devices(target, 32)) == 32
