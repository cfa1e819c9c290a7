"""Settings that JAX reads when it first runs something; the user's own ones win."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import jax

from mkc.ir.graph import Graph

CACHE_FOLDER = Path("~/.cache/mkc/xla")
CACHE_VARIABLE = "MKC_CACHE"  # another folder, or CACHE_OFF
CACHE_OFF = "off"
# bf16 results are rounded where the graph says so, not where XLA finds it cheaper.
ROUNDING_FLAG = "xla_allow_excess_precision"
DEVICES_FLAG = "xla_force_host_platform_device_count"
THREADS_VARIABLE = "NPROC"  # how many XLA takes, instead of one for each core
DISPATCH_VARIABLE = "JAX_CPU_ENABLE_ASYNC_DISPATCH"
# Elements of a matrix from which two threads multiply eight bf16 rows faster than one. Measured on
# two cores: 512 x 512 takes 49 us with one and 46 us with two, 768 x 768 takes 125 and 80.
WORTH_THREADS = 512 * 512


def prepare_jax(*, devices: int | None, on_cpu: bool) -> None:
    """Precision, devices, and where compiled programs are kept. Before anything runs.

    Args:
      devices: CPU devices to simulate.
    """
    flags = {ROUNDING_FLAG: "false"}
    if devices is not None:
        flags[DEVICES_FLAG] = str(devices)
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{flag}={value}" for flag, value in flags.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()
    if on_cpu and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    cache = cache_folder()
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        # The many small programs that place weights take most of the time to open a small model.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def choose_threads(graph: Graph) -> None:
    """Has XLA evaluate a graph of small matrices in one thread, the caller's. Before anything runs.

    Sharing such a product out takes as long as it saves, and keeps a second core busy, which a
    server and its clients need. Handing a step of half a millisecond to another thread, and waiting
    for it, takes a tenth of it.
    """
    largest = max(prod(one.type.shape) for one in graph.params.values())
    if largest <= WORTH_THREADS:
        os.environ.setdefault(THREADS_VARIABLE, "1")
        if DISPATCH_VARIABLE not in os.environ:
            jax.config.update(DISPATCH_VARIABLE.lower(), False)


def cache_folder() -> Path | None:
    """Where mkc has compiled programs kept; None where JAX was told, or nothing is to be kept."""
    chosen = os.environ.get(CACHE_VARIABLE) or str(CACHE_FOLDER)
    told = "JAX_COMPILATION_CACHE_DIR" in os.environ
    return None if told or chosen == CACHE_OFF else Path(chosen).expanduser()
