"""Settings every test relies on. JAX reads them when it is first imported, hence from here."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest_plugins = ["tests.golden.fixture", "tests.crashes"]

MOST_RESIDENT = 2 << 30  # bytes of a worker; two of them and a compiler fit a small machine
VIRTUAL_DEVICES = 8  # the largest mesh that the tests simulate on the CPU

XLA_FLAGS = (
    # bf16 results are rounded where the graph says so, not where XLA finds it cheaper
    "--xla_allow_excess_precision=false",
    f"--xla_force_host_platform_device_count={VIRTUAL_DEVICES}",
)

assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could configure it"
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS)).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu must not look for a cloud metadata server


_STATES: dict[str, Any] = {}  # module -> state of its RANDOM when the first test begins


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test gets the same numbers whichever tests run before it."""
    for name, module in list(sys.modules.items()):
        random = getattr(module, "RANDOM", None) if name.startswith("tests.") else None
        if isinstance(random, np.random.Generator):
            random.bit_generator.state = _STATES.setdefault(name, random.bit_generator.state)


@pytest.fixture(autouse=True, scope="module")
def _bounded_memory() -> Iterator[None]:
    """Compiled programs of a module are let go when they have become many."""
    yield
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MOST_RESIDENT and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
