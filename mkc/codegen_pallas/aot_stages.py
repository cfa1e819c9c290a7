"""Stages of a kernel inside the TPU compiler: its Mosaic IR and its machine code, as text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mkc.codegen_pallas.aot import TIMEOUT_SECONDS
from mkc.codegen_pallas.aot import child_environment

NAME = re.compile(r'^NAME = "(\w+)"', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CompilerStages:
    """Texts of the compiler's dump.

    Attributes:
      mosaic: the kernel in the Mosaic dialects, as the compiler received it.
      bundles: its final instruction bundles.
      error: what the compiler said when it made no machine code; the texts are empty then.
    """

    mosaic: str = ""
    bundles: str = ""
    error: str = ""


def compiler_stages(
    source: str, *, topology: str, timeout_seconds: float = TIMEOUT_SECONDS
) -> CompilerStages:
    """Compiles the text of a kernel module and reads the compiler's dump.

    Args:
      topology: a name that libtpu knows, such as `gen:2x2x1`.
    """
    name = NAME.search(source)
    assert name is not None, "the source is no kernel module: it has no NAME"
    with TemporaryDirectory(prefix="mkc-stages-") as folder:
        kernel, dump, request = (Path(folder, one) for one in ("kernel.py", "dump", "request.json"))
        result = Path(folder, "result.json")
        kernel.write_text(source, encoding="utf-8")
        document = {
            "kernel_path": str(kernel),
            "topology": topology,
            "dump_path": str(dump),
            "result_path": str(result),
        }
        request.write_text(json.dumps(document), encoding="utf-8")
        environment = child_environment(str(dump))
        environment["LIBTPU_INIT_ARGS"] += f" --xla_mosaic_dump_to={dump}"
        try:
            child = subprocess.run(
                [sys.executable, "-m", "mkc.codegen_pallas.aot", str(request)],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = f"the compiler did not finish within {timeout_seconds:g} s"
            return CompilerStages(error=error)
        if not result.exists():
            return CompilerStages(error=child.stderr.decode(errors="replace").strip())
        outcome = json.loads(result.read_text(encoding="utf-8"))
        if not outcome["ok"]:
            return CompilerStages(error=str(outcome["error"]))
        return CompilerStages(
            mosaic=_text(dump, f"*mosaic-dump-{name[1]}-original.txt"),
            bundles=_text(dump, f"*{name[1]}*-final_bundles.txt"),
        )


def _text(dump: Path, pattern: str) -> str:
    files = [one for one in sorted(dump.glob(pattern)) if "schedule-analysis" not in one.name]
    assert files, f"the TPU compiler's dump has no {pattern}"
    return max((one.read_text(encoding="utf-8") for one in files), key=len)
