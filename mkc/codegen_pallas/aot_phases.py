"""Machine code by phase: an ahead-of-time compilation with a marker around every phase.

`python -m mkc.codegen_pallas.aot_phases KERNEL.py TOPOLOGY` is a process of its own, for the same
reasons as in `aot`. It names every phase function of the kernel module with `jax.named_scope` and
asks the compiler to keep the names in the code. The markers add a few bundles and keep the compiler
from moving instructions across phases, so this compilation is for analysis; the kernel that runs is
compiled without them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mkc.codegen_pallas.aot import AXIS
from mkc.codegen_pallas.aot import TIMEOUT_SECONDS
from mkc.codegen_pallas.aot import child_environment
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.bundles import bundle_costs

KEEP_NAMES = "--xla_enable_custom_call_region_trace=true"
PHASE = re.compile(r"(p\d+)_")  # functions of a kernel module that are phases
NAME = re.compile(r'^NAME = "(\w+)"', re.MULTILINE)


def phase_machine_code(
    source: str, *, topology: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, PhaseCycles]:
    """Compiles the text of a kernel module and reads the machine code of its phases.

    Args:
      topology: a name that libtpu knows, such as `gen:2x2x1`.

    Returns:
      By phase id; empty when the compiler refuses the kernel or does not end in time, which
      `aot.compile_ahead` explains.
    """
    name = NAME.search(source)
    assert name is not None, "the source is no kernel module: it has no NAME"
    with TemporaryDirectory(prefix="mkc-phases-") as folder:
        path, dump = Path(folder, "kernel.py"), Path(folder, "dump")
        path.write_text(source, encoding="utf-8")
        environment = child_environment(str(dump))
        environment["LIBTPU_INIT_ARGS"] += f" {KEEP_NAMES}"
        try:
            child = subprocess.run(
                [sys.executable, "-m", "mkc.codegen_pallas.aot_phases", str(path), topology],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}
        return bundle_costs(dump, name[1]) if child.returncode == 0 else {}


def main(arguments: list[str]) -> None:
    """Compiles a kernel module; JAX is imported here, after the environment is set."""
    import jax
    import numpy
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from mkc.codegen_pallas.aot import _load

    kernel_path, topology = arguments
    module = _load(kernel_path)
    for name, value in list(vars(module).items()):
        match = PHASE.match(name)
        if match is not None and callable(value):
            setattr(module, name, jax.named_scope(match[1])(value))
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    mesh = Mesh(numpy.array(devices[: module.RANKS]), (AXIS,))
    module.build(mesh).lower(*module.abstract_arguments(mesh)).compile()


if __name__ == "__main__":
    main(sys.argv[1:])
