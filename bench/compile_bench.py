"""Time, memory and size of compiling the large models; prints a table.

    .venv/bin/python bench/compile_bench.py
    .venv/bin/python bench/compile_bench.py kimi_k3  # of those whose model has this name

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MKC = Path(sys.executable).with_name("mkc")
CONFIGS = ROOT / "models" / "configs"
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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is compiled; `config` None for the model's own."""

    title: str
    model: str
    target: str
    config: Path | None = None
    options: tuple[str, ...] = ()


def compile_once(folder: Path, variant: Variant) -> Measured:
    """Runs `mkc compile` and measures it."""
    start = time.perf_counter()
    command = [str(MKC), "compile", variant.model, "--target", variant.target, "--json"]
    command += ["--out", str(folder), *variant.options]
    command += ["--config", str(variant.config)] if variant.config else []
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - start
    report = json.loads(child.stdout)
    # kilobytes on Linux; the largest of all children so far, theirs included, so not too small
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Measured(
        seconds=seconds, peak_bytes=children + report["aot"]["peak_bytes"], report=report
    )


def variants(folder: Path) -> list[Variant]:
    """The models, and the same with more layers.

    A mixture of twice the layers exceeds the memory of the devices, so half of its experts are left
    out, which changes no instruction; the same at its own depth is there to compare with.
    """
    qwen = {"model": "qwen38", "target": "tpu7x:2x2x1"}
    kimi = {"model": "kimi_k3", "target": "tpu7x:2x2x4"}
    deeper_qwen = _deeper(_text("qwen38_27b.json"), 10)
    halved = _text("kimi_k3.json")
    halved["text_config"]["num_experts"] //= 2
    return [
        Variant(title="64 layers, batch 1", **qwen),
        Variant(title="64 layers, batch 8", options=("--batch", "8"), **qwen),
        Variant(title="640 layers, batch 1", config=_written(folder, deeper_qwen), **qwen),
        Variant(title="93 layers of a mixture", **kimi),
        Variant(title="the same, half of the experts", config=_written(folder, halved), **kimi),
        Variant(title="186 layers of it", config=_written(folder, _deeper(halved, 2)), **kimi),
    ]


def _text(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return config


def _deeper(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A config with so many times the layers, by the same rule for their kinds."""
    deeper: dict[str, Any] = json.loads(json.dumps(config))
    text = deeper.get("text_config", deeper)
    depth = text["num_hidden_layers"]
    text["num_hidden_layers"] = depth * times
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"] * times
    if "linear_attn_config" in text:
        kinds = text["linear_attn_config"]
        period, last = kinds["full_attn_layers"][0], depth * times
        numbers = range(1, last + 1)
        full = [one for one in numbers if one % period == 0 or one == last]
        kinds["full_attn_layers"] = full
        kinds["kda_layers"] = [one for one in numbers if one not in full]
    return deeper


def _written(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / f"config_{len(list(folder.iterdir()))}.json"
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


def main(models: Sequence[str]) -> None:
    """Compiles every variant, or those of the named models, and prints the table."""
    with TemporaryDirectory(prefix="mkc-bench-") as name:
        folder = Path(name)
        rows = []
        for one in variants(folder):
            if models and one.model not in models:
                continue
            print(f"compiling: {one.title}", file=sys.stderr)
            rows.append(row(one.title, compile_once(folder / "out", one)))
    print_table(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
