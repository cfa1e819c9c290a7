"""What `mkc compile` tells a person when it is done: one screen, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from mkc.plan.weights import Weighed

NONE = "none"  # the scheme without drafts, whose rounds are decode steps
MEGABYTE = 1_000_000
MIB = 1 << 20
GIB = 1 << 30
SCREEN_WIDTH = 80
LABEL_WIDTH = 13
BAR_WIDTH = 20
LARGEST, HEAVIEST = 3, 4  # buffers and decisions that are named


def print_summary(report: Mapping[str, Any], folder: Path, decisions: Sequence[Weighed]) -> None:
    """The report's main figures on stdout.

    Args:
      decisions: all of them, heaviest first.
    """
    console = Console(highlight=False, soft_wrap=True)
    for label, text in _rows(report, folder, decisions):
        console.print(f"[bold]{label:<{LABEL_WIDTH}}[/bold] {escape(text)}")


def _rows(
    report: Mapping[str, Any], folder: Path, decisions: Sequence[Weighed]
) -> Iterator[tuple[str, str]]:
    moved = report["bytes"]
    share = 100.0 * moved["padding"] / moved["tape"]
    yield "model", f"{report['model']}, scheme {report['scheme']}"
    yield "target", f"{report['target']}, {report['ranks']} ranks"
    unit = "step" if report["scheme"] == NONE else "round"
    yield unit, f"batch {report['batch']}, rows {report['rows']}, context {report['context']}"
    yield (
        "tape",
        f"{moved['tape'] / MEGABYTE:.1f} MB per rank and {unit}, {share:.2f} % of it padding",
    )
    if moved["experts"]:
        yield (
            "experts",
            f"{moved['experts'] / MEGABYTE:.1f} MB that the rank with most of them reads",
        )
    if moved["draft"]:
        yield "", f"{moved['draft'] / MEGABYTE:.1f} MB of it for the next drafts"
    if moved["state"] or moved["kv"]:
        yield (
            "states",
            f"{moved['state'] / MEGABYTE:.1f} MB read and written, up to "
            f"{moved['kv'] / MEGABYTE:.1f} MB of caches",
        )
    for one in report["rounding"]:
        yield "rounding", one
    yield "vmem", _vmem(report["vmem"])
    yield (
        "",
        _cut(
            ", ".join(
                f"{name} {count / MIB:.2f}" for name, count in report["vmem"]["largest"][:LARGEST]
            )
        ),
    )
    hbm = report["hbm"]
    yield (
        "memory",
        f"{hbm['total_bytes'] / GIB:.2f} of {hbm['limit_bytes'] / GIB:.2f} GiB of each device "
        "when it is served",
    )
    yield from _predicted(report, unit)
    yield "TPU compiler", _compiled(report["aot"])
    yield "decisions", f"{report['decisions']}, the heaviest of them:"
    for one in decisions[:HEAVIEST]:
        yield "", _cut(f"{one.decision.id}: {one.decision.chosen}")
    yield "written to", str(folder)
    yield "next", f"mkc viz {folder}, mkc explain {folder}"


def _cut(text: str) -> str:
    """A text that fits into its line; `mkc explain` has the whole one."""
    longest = SCREEN_WIDTH - LABEL_WIDTH - 1
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _vmem(vmem: Mapping[str, Any]) -> str:
    """A bar of what is planned, what is left to the compiler, and what is free."""
    limit = vmem["limit_bytes"]
    planned = round(BAR_WIDTH * vmem["peak_bytes"] / limit)
    reserve = min(round(BAR_WIDTH * vmem["reserve_bytes"] / limit), BAR_WIDTH - planned)
    bar = "#" * planned + "." * (BAR_WIDTH - planned - reserve) + "c" * reserve
    return (
        f"[{bar}] {vmem['peak_bytes'] / MIB:.2f} of {limit / MIB:.2f} MiB, "
        f"{vmem['reserve_bytes'] / MIB:.2f} the compiler's"
    )


def _predicted(report: Mapping[str, Any], unit: str) -> Iterator[tuple[str, str]]:
    predicted = report["predicted"]
    if predicted is None:
        yield "predicted", f"at least {report['floor_us']:,.1f} us a {unit}"
        return
    yield (
        "predicted",
        f"{predicted['round_us']:,.1f} us a {unit}, floor {predicted['floor_us']:,.1f} us: "
        f"{100 * predicted['utilization']:.1f} % of the memory's rate",
    )
    yield "", f"caches read up to position {predicted['position']:,} of every sequence"
    if predicted["routing"]:
        yield "", "experts chosen evenly, by each row for itself"
    if alike := report["predicted_alike"]:
        yield (
            "",
            f"{alike['round_us']:,.1f} us, floor {alike['floor_us']:,.1f} us, if all rows choose "
            "the same",
        )
    yield "", "core times from: " + ", ".join(_shares(predicted["cost_source"]))
    if phases := _phases(predicted["exchanges"]["round"]):
        yield "", f"exchanges: {phases} phases a {unit}, one after the other"
    exposed = {key: us for key, us in predicted["exposed"].items() if us >= 0.05}
    if exposed:
        yield (
            "",
            "memory idle, us: " + ", ".join(f"{key} {_short(us)}" for key, us in exposed.items()),
        )


def _phases(counts: Mapping[str, int]) -> str:
    """Dependent phases of exchanges, by the farthest link that they use."""
    return " + ".join(f"{count} {hop}" for hop, count in counts.items())


def _short(us: float) -> str:
    return f"{us:,.1f}" if us < 10 else f"{us:,.0f}"


def _shares(sources: Mapping[str, float]) -> Iterator[str]:
    """Of the core's work, by where its times come from; largest first."""
    for source, share in sorted(sources.items(), key=lambda one: (-one[1], one[0])):
        yield f"{source} {100 * share:.0f} %"


def _compiled(aot: Mapping[str, Any] | None) -> str:
    if aot is None:
        return "not asked (--no-aot)"
    return (
        f"accepted: {aot['custom_calls']} launch, {aot['bundles']} bundles, {aot['seconds']:.1f} s "
        f"(jax {aot['jax']}, libtpu {aot['libtpu']})"
    )
