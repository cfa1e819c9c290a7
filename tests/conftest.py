"""Settings every test relies on. JAX reads them when it is first imported, hence from here."""

from __future__ import annotations

import os
import sys

pytest_plugins = ["tests.golden.fixture"]

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
