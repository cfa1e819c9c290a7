"""What `mkc compile` tells a person when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

MEGABYTE = 1_000_000
MIB = 1 << 20
LABEL_WIDTH = 13


def print_summary(report: Mapping[str, Any], folder: Path) -> None:
    """The report's main figures on stdout, one a line; plain text when it is not a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    for label, text in _rows(report, folder):
        console.print(f"[bold]{label:<{LABEL_WIDTH}}[/bold] {escape(text)}")


def _rows(report: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    moved = report["bytes"]
    vmem = report["vmem"]
    share = 100.0 * moved["padding"] / max(1, moved["tape"] - moved["padding"])
    yield "model", f"{report['model']}, scheme {report['scheme']}"
    yield "target", f"{report['target']}, {report['ranks']} ranks"
    yield "step", f"batch {report['batch']}, rows {report['rows']}, context {report['context']}"
    yield (
        "tape",
        f"{moved['tape'] / MEGABYTE:.1f} MB per rank and step, {share:.2f} % of it padding",
    )
    yield "vmem", f"{vmem['peak_bytes'] / MIB:.2f} of {vmem['limit_bytes'] / MIB:.2f} MiB"
    yield "decisions", str(report["decisions"])
    yield "TPU compiler", _compiled(report["aot"])
    yield "written to", str(folder)


def _compiled(aot: Mapping[str, Any] | None) -> str:
    if aot is None:
        return "not asked (--no-aot)"
    return (
        f"accepted: {aot['custom_calls']} launch, {aot['bundles']} bundles, {aot['seconds']:.1f} s "
        f"(jax {aot['jax']}, libtpu {aot['libtpu']})"
    )
