"""Time, memory and size of compiling the 27B model; prints a table.

    .venv/bin/python bench/compile_bench.py

Each row is a process of its own, which waits while the TPU compiler runs in another: peak memory is
an upper bound, the sum of both peaks. Nothing here runs the kernel, so the floor of a step is a
prediction: its bytes over the target's sustained bandwidth.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MKC = Path(sys.executable).with_name("mkc")
CONFIG = ROOT / "models" / "configs" / "qwen38_27b.json"
TARGET = "tpu7x:2x2x1"
TIMES_DEEPER = 10
MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000
MIB = 1 << 20

HEADINGS = (
    "variant",
    "total s",
    "passes s",
    "AOT s",
    "peak GB <=",
    "tape MB",
    "floor MB",
    "over %",
    "VMEM MiB",
    "bundles",
    "step floor us",
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One compilation.

    Attributes:
      seconds: wall time of the whole command.
      peak_bytes: upper bound of the resident memory of the command and the TPU compiler together.
      report: its report.json.
    """

    seconds: float
    peak_bytes: int
    report: Mapping[str, Any]


def compile_once(folder: Path, *options: str) -> Measured:
    """Runs `mkc compile` and measures it."""
    start = time.perf_counter()
    command = [str(MKC), "compile", "qwen38", "--target", TARGET, "--out", str(folder), "--json"]
    child = subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - start
    report = json.loads(child.stdout)
    # kilobytes on Linux; the largest of all children so far, theirs included, so not too small
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Measured(
        seconds=seconds, peak_bytes=children + report["aot"]["peak_bytes"], report=report
    )


def deeper_config(folder: Path) -> Path:
    """The 27B config with ten times as many layers."""
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    text["num_hidden_layers"] *= TIMES_DEEPER
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"] * TIMES_DEEPER
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def row(name: str, measured: Measured) -> tuple[str, ...]:
    """The cells of one line, in the order of `HEADINGS`."""
    report = measured.report
    tape = report["bytes"]["tape"]
    padding = report["bytes"]["padding"]
    return (
        name,
        f"{measured.seconds:.1f}",
        f"{report['timing']['passes']:.2f}",
        f"{report['timing']['aot']:.1f}",
        f"{measured.peak_bytes / GIGABYTE:.2f}",
        f"{tape / MEGABYTE:.1f}",
        f"{(tape - padding) / MEGABYTE:.1f}",
        f"{100 * padding / (tape - padding):.2f}",
        f"{report['vmem']['peak_bytes'] / MIB:.2f}",
        f"{report['aot']['bundles']}",
        f"{report['floor_us']:.0f}",
    )


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Markdown, aligned, so that it can be pasted anywhere."""
    lines = [HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    rule = tuple("-" * width for width in widths)
    for line in (HEADINGS, rule, *rows):
        cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Compiles every variant and prints the table."""
    with TemporaryDirectory(prefix="mkc-bench-") as name:
        folder = Path(name)
        variants = {
            "64 layers, batch 1": [],
            "64 layers, batch 8": ["--batch", "8"],
            "640 layers, batch 1": ["--config", str(deeper_config(folder))],
        }
        rows = []
        for title, options in variants.items():
            print(f"compiling: {title}", file=sys.stderr)
            rows.append(row(title, compile_once(folder / "out", *options)))
    print_table(rows)


if __name__ == "__main__":
    main()
