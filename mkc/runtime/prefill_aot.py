"""Ahead-of-time compilation of prefill programs by the real TPU compiler, without a TPU.

As for kernels (`mkc.codegen_pallas.aot`) it runs in a process of its own, which is
`python -m mkc.runtime.prefill_aot REQUEST.json`. The request holds the graph as text, so that the
process builds the very function that the runtime calls.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from mkc.codegen_pallas.aot import ERROR_CHARACTERS
from mkc.codegen_pallas.aot import TIMEOUT_SECONDS
from mkc.codegen_pallas.aot import child_environment
from mkc.ir.graph import Graph
from mkc.ir.text import print_graph

# Instructions that write a whole new array, as the HLO text names them.
COPY = re.compile(r"= (\w+)\[([\d,]+)\][^=]*? (?:copy|copy-start|transpose)\(")
COMPUTATION = re.compile(r"^%([\w.-]+) \(")  # the first line of one that is not the entry
# Inside a fusion a copy of an operand that keeps the operand's memory is a view in another layout;
# what comes behind it reads the part that it needs.
VIEW = re.compile(r"output_to_operand_aliasing=\{.*?\}, calls=%([\w.-]+)")
FUSED = "fused_computation"
LARGE_BYTES = 64 << 20  # above any activation and any single matrix but the LM head


@dataclass(frozen=True, kw_only=True)
class PrefillAot:
    """What the TPU compiler made of a prefill program; bytes are per device.

    Attributes:
      ok: it compiled.
      argument_bytes: weights, states and scalars.
      aliased_bytes: arguments that are changed in place.
      temporary_bytes: what the program needs besides its arguments and results.
      large_copies: instructions that copy an array of more than `LARGE_BYTES`.
      seconds: of tracing and compilation.
      error: why `ok` is False; None otherwise.
    """

    ok: bool
    argument_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    large_copies: tuple[str, ...] = ()
    seconds: float = 0.0
    jax: str
    libtpu: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the child process is asked to do; `prompts_text` is empty for the kernel's own graph."""

    graph_text: str
    prompts_text: str
    target: str
    tp: int
    passes: str
    rows: int
    lanes: int
    result_path: str


def compile_prefill_ahead(
    graph: Graph,
    *,
    target: str,
    tp: int,
    rows: int,
    lanes: int = 1,
    prompts: Graph | None = None,
    passes: str = "",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> PrefillAot:
    """Compiles one prefill program.

    Args:
      graph: of the kernel, with its batch and context.
      prompts: what is evaluated, as `graph` of `PrefillProgram`.
      target: `GENERATION:TOPOLOGY`.
      tp: ranks.
      rows, lanes: as of `PrefillProgram`.
    """
    with TemporaryDirectory(prefix="mkc-prefill-") as folder:
        result_path = Path(folder, "result.json")
        request = _Request(
            graph_text=print_graph(graph),
            prompts_text="" if prompts is None else print_graph(prompts),
            target=target,
            tp=tp,
            passes=passes,
            rows=rows,
            lanes=lanes,
            result_path=str(result_path),
        )
        request_path = Path(folder, "request.json")
        request_path.write_text(json.dumps(asdict(request)), encoding="utf-8")
        try:
            child = subprocess.run(
                [sys.executable, "-m", "mkc.runtime.prefill_aot", str(request_path)],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return _failure(f"the compiler did not finish within {timeout_seconds:g} s")
        if not result_path.exists():
            output = child.stdout.decode(errors="replace").strip()
            return _failure(
                f"the compiler process ended with status {child.returncode}; the end of its output:"
                f"\n{output[-ERROR_CHARACTERS // 2 :]}"
            )
        fields = json.loads(result_path.read_text(encoding="utf-8"))
    return PrefillAot(**{**fields, "large_copies": tuple(fields["large_copies"])})


def _failure(error: str) -> PrefillAot:
    return PrefillAot(
        ok=False,
        jax=version("jax"),
        libtpu=version("libtpu"),
        error=error[:ERROR_CHARACTERS],
    )


def large_copies(hlo: str) -> tuple[str, ...]:
    """Shapes of copied arrays above `LARGE_BYTES`, in the order of the HLO text."""
    sizes = {"bf16": 2, "f32": 4, "s32": 4}
    views = _views(hlo)
    found = []
    computation = ""
    for line in hlo.splitlines():
        if (start := COMPUTATION.match(line)) is not None:
            computation = start[1]
        for dtype, dimensions in COPY.findall(line):
            elements = prod(int(one) for one in dimensions.split(","))
            large = elements * sizes.get(dtype, 1) > LARGE_BYTES
            if large and computation not in views:
                found.append(f"{dtype}[{dimensions}]")
    return tuple(found)


def _views(hlo: str) -> frozenset[str]:
    """Computations that fused ones call for an operand in another layout."""
    found = set()
    computation = ""
    for line in hlo.splitlines():
        if (start := COMPUTATION.match(line)) is not None:
            computation = start[1]
        if FUSED in computation and (view := VIEW.search(line)) is not None:
            found.add(view[1])
    return frozenset(found)


def _compile(request: _Request) -> PrefillAot:
    """Runs in the child process; JAX is imported here, after the environment is set."""
    import numpy
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from mkc.driver import lower_graph
    from mkc.ir.text_parse import parse
    from mkc.runtime.prefill import PrefillProgram
    from mkc.targets import load_target

    target = load_target(request.target)
    lowered = lower_graph(parse(request.graph_text), target, tp=request.tp, passes=request.passes)
    description = topologies.get_topology_desc(platform="tpu", topology_name=request.target)
    devices = list(description.devices)[: request.tp]
    mesh = Mesh(numpy.array(devices), ("tp",))
    program = PrefillProgram(
        lowered=lowered,
        mesh=mesh,
        rows=request.rows,
        lanes=request.lanes,
        graph=parse(request.prompts_text) if request.prompts_text else None,
    )
    start = time.perf_counter()
    compiled = program.compiled
    seconds = time.perf_counter() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None, "the compiler does not tell what memory the program needs"
    assert hlo is not None, "the compiler does not show the program"
    return PrefillAot(
        ok=True,
        argument_bytes=memory.argument_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        large_copies=large_copies(hlo),
        seconds=seconds,
        jax=version("jax"),
        libtpu=version("libtpu"),
    )


def main(arguments: list[str]) -> None:
    """Compiles what the request file asks for and writes the result file."""
    (request_path,) = arguments
    request = _Request(**json.loads(Path(request_path).read_text(encoding="utf-8")))
    try:
        result = _compile(request)
    except Exception as error:  # whatever the compiler says belongs into the result
        result = _failure(f"{type(error).__name__}: {error}")
    Path(request.result_path).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
