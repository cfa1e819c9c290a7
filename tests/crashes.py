"""What is known of a worker process that ended in the middle of a test: how, and the memory."""

from __future__ import annotations

import resource
from typing import Any

import pytest

MIB = 1 << 20


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any) -> None:
    """Adds the exit status, negative for a signal, to what the summary says of the test."""
    status = report.node.gateway._io.wait()
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 // MIB
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
    report.longrepr += (
        f"; exit status {status}, largest process of all so far {largest} MiB, "
        f"{int(free) * 1024 // MIB} MiB available now"
    )
