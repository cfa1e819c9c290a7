"""Ahead-of-time compilation of a generated kernel by the real TPU compiler, without a TPU.

It runs in a process of its own: libtpu reads its options once, when JAX is first imported, and its
memory goes back to the system afterwards. `python -m mkc.codegen_pallas.aot REQUEST.json` is that
process; `compile_ahead` writes the request, starts it and reads the result.

A kernel module has `NAME` (of the Pallas kernel), `RANKS`, `build(mesh, interpret=False)` that
returns a jitted function, and `abstract_arguments(mesh)` that returns its arguments as
`ShapeDtypeStruct`s with shardings over the mesh, whose only axis is `tp`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from importlib.metadata import version
from importlib.util import module_from_spec
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

AXIS = "tp"
LAUNCH = 'custom_call_target="tpu_custom_call"'
# HLO that only passes arguments and results on; the program does no work in them.
PLUMBING = frozenset({"parameter", "tuple", "get-tuple-element", "bitcast"})
TIMEOUT_SECONDS = 900.0
ERROR_CHARACTERS = 8_000  # the compiler lists the largest allocations after its first lines
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?(%?[\w.-]+) = (.*)$")
# Token ids, positions and options, one word per sequence or row, on their way between device and
# scalar memory.
SCALARS = re.compile(r"[sf]32\[\d+\]\{")
OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(")
BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s", re.MULTILINE)
# What is read of the compiler's dump. Writing all its steps takes as long as compiling.
DUMPED = "critical-path|final_bundles"


@dataclass(frozen=True, kw_only=True)
class AotResult:
    """What the TPU compiler made of a kernel.

    Attributes:
      ok: it compiled, to one launch and nothing else.
      custom_calls: Pallas launches in the compiled program.
      other_ops: instructions of the program besides that launch and its arguments, such as copies.
      seconds: wall time of the whole process.
      lower_seconds, compile_seconds: its two parts inside JAX.
      bundles: instruction bundles of the kernel's machine code.
      argument_bytes: HBM of all arguments, per device.
      aliased_bytes: arguments whose memory is that of a result, per device: what changes in place.
      temporary_bytes: HBM that the program needs besides its arguments and results, per device.
      peak_bytes: largest resident memory of the process.
      jax, libtpu: versions.
      error: why `ok` is False; None otherwise.
    """

    ok: bool
    custom_calls: int = 0
    other_ops: tuple[str, ...] = ()
    seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    bundles: int = 0
    argument_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    peak_bytes: int = 0
    jax: str
    libtpu: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the child process is asked to do; all paths are absolute."""

    kernel_path: str
    topology: str
    dump_path: str
    result_path: str


def compile_ahead(
    kernel: Path | str, *, topology: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> AotResult:
    """Compiles a kernel module for `topology`, such as `gen:2x2x1`.

    Args:
      kernel: the path of the module, or its source text.
      topology: a name that libtpu knows; the first `RANKS` of its devices are used.
      timeout_seconds: the compiler is stopped after this time.
    """
    start = time.perf_counter()
    with TemporaryDirectory(prefix="mkc-aot-") as folder:
        path = kernel if isinstance(kernel, Path) else Path(folder, "kernel.py")
        if isinstance(kernel, str):
            path.write_text(kernel, encoding="utf-8")
        request = _Request(
            kernel_path=str(path.resolve()),
            topology=topology,
            dump_path=str(Path(folder, "dump")),
            result_path=str(Path(folder, "result.json")),
        )
        result = _run(request, Path(folder), timeout_seconds)
    return replace(result, seconds=time.perf_counter() - start)


def _run(request: _Request, folder: Path, timeout_seconds: float) -> AotResult:
    """Starts the child process and reads its result, or tells how it ended without one."""
    request_path = folder / "request.json"
    request_path.write_text(json.dumps(asdict(request)), encoding="utf-8")
    try:
        child = subprocess.run(
            [sys.executable, "-m", "mkc.codegen_pallas.aot", str(request_path)],
            env=child_environment(request.dump_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failure(f"the compiler did not finish within {timeout_seconds:g} s")
    result_path = Path(request.result_path)
    if result_path.exists():
        fields = json.loads(result_path.read_text(encoding="utf-8"))
        return AotResult(**{**fields, "other_ops": tuple(fields["other_ops"])})
    output = child.stdout.decode(errors="replace").strip()
    return _failure(
        f"the compiler process ended with status {child.returncode}; the end of its output:\n"
        f"{output[-ERROR_CHARACTERS:]}"
    )


def child_environment(dump_path: str = "") -> dict[str, str]:
    """The child's environment: no accelerator, no cloud metadata.

    Args:
      dump_path: folder for the machine code as text; empty for none.
    """
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # tests set virtual devices and precision for the CPU there
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TPU_SKIP_MDS_QUERY"] = "1"
    # libtpu's lock file guards a real TPU; compilers without one do not disturb each other
    environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    dump = (
        f"--xla_jf_dump_to={dump_path} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={DUMPED}"
    )
    environment["LIBTPU_INIT_ARGS"] = dump if dump_path else ""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else [root]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _failure(error: str) -> AotResult:
    return AotResult(ok=False, jax=version("jax"), libtpu=version("libtpu"), error=error)


def entry_instructions(hlo: str) -> Iterator[tuple[str, str, str]]:
    """(name, opcode, rest of the line) of every instruction of the entry computation."""
    inside = False
    for line in hlo.splitlines():
        if line.startswith("ENTRY "):
            inside = True
        elif inside and line.startswith("}"):
            return
        elif inside and (match := INSTRUCTION.match(line)):
            name, rest = match.groups()
            opcode = OPCODE.search(" " + rest)
            assert opcode, f"no opcode in the HLO line {line!r}"
            yield name.lstrip("%"), opcode[1], rest


def other_operations(hlo: str) -> tuple[str, ...]:
    """Entry instructions that are neither a Pallas launch nor plumbing, as `opcode name`."""
    return tuple(
        f"{opcode} {name}"
        for name, opcode, rest in entry_instructions(hlo)
        if opcode not in PLUMBING
        and not (opcode == "custom-call" and LAUNCH in rest)
        and not (opcode == "copy" and SCALARS.match(rest))
    )


def count_bundles(dump_path: Path, kernel_name: str) -> int:
    """Instruction bundles of a kernel in the compiler's dump."""
    files = [
        path
        for path in sorted(dump_path.glob(f"*{kernel_name}*-final_bundles.txt"))
        if "schedule-analysis" not in path.name
    ]
    assert files, f"no machine code of kernel {kernel_name!r} in the dump of the TPU compiler"
    return max(len(BUNDLE.findall(path.read_text(encoding="utf-8"))) for path in files)


def _load(path: str) -> ModuleType:
    spec = spec_from_file_location("mkc_generated_kernel", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _peak_bytes() -> int:
    """Largest resident memory of this process.

    Not `getrusage`: its maximum includes the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _compile(request: _Request) -> AotResult:
    """Runs in the child process; JAX is imported here, after the environment is set."""
    import numpy
    from jax.experimental import topologies
    from jax.sharding import Mesh

    module = _load(request.kernel_path)
    description = topologies.get_topology_desc(platform="tpu", topology_name=request.topology)
    devices = list(description.devices)
    ranks: int = module.RANKS
    assert ranks <= len(devices), f"{request.topology} has {len(devices)} devices, not {ranks}"
    mesh = Mesh(numpy.array(devices[:ranks]), (AXIS,))
    start = time.perf_counter()
    lowered = module.build(mesh).lower(*module.abstract_arguments(mesh))
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    launches = hlo.count(LAUNCH)
    others = other_operations(hlo)
    ok = launches == 1 and not others
    return AotResult(
        ok=ok,
        custom_calls=launches,
        other_ops=others,
        lower_seconds=lowered_at - start,
        compile_seconds=compiled_at - lowered_at,
        bundles=count_bundles(Path(request.dump_path), module.NAME),
        argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=_peak_bytes(),
        jax=version("jax"),
        libtpu=version("libtpu"),
        error=None
        if ok
        else f"expected one launch and nothing else, got {launches} and {', '.join(others) or '-'}",
    )


def main(arguments: list[str]) -> None:
    """Compiles what the request file asks for and writes the result file."""
    (request_path,) = arguments
    request = _Request(**json.loads(Path(request_path).read_text(encoding="utf-8")))
    try:
        result = _compile(request)
    except Exception as error:  # whatever the compiler or the kernel says belongs into the result
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
        result = replace(_failure(text), peak_bytes=_peak_bytes())
    Path(request.result_path).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
