"""Colours that all pictures share: calm ones for work, warm ones for time that is lost."""

from __future__ import annotations

WORK = {
    "matmul": "#4e79a7",
    "narrow matmul": "#7ba3cc",
    "vector": "#a6bddb",
    "attention": "#7d6fb3",
    "rows attention": "#7d6fb3",
    "delta rule": "#a397cf",
    "kept delta rule": "#a397cf",
    "embed": "#8c96a3",
    "argmax": "#6b7785",
    "accept": "#6b7785",
    "top k": "#6b7785",
    "selector walk": "#7d8894",
    "markov walk": "#7d8894",
    "cut drafts": "#8c96a3",
    "scalar": "#8c96a3",
    "tap": "#a6bddb",
    "all reduce": "#c2a05a",
    "all gather": "#c2a05a",
    "copy of weights": "#76b7a5",
    "other copy": "#3f7f71",
    "issue": "#6b7785",
    "message": "#c2a05a",
}
STALLS = {
    "tape": "#d1495b",
    "exchange": "#ed8b4a",
    "copy": "#b84e9c",
    "barrier": "#8f3b52",
    "matrix drain": "#e2b33c",
}
OTHER = "#b8bec6"
PADDING = "#e6c29f"
CRITICAL = "#1b1f24"
FLOOR = "#2f8f5b"
PEAK = "#d1495b"


def work_colour(kind: str) -> str:
    """Of a kind of phase or copy."""
    return WORK.get(kind, OTHER)


def stall_colour(reason: str) -> str:
    """Of a reason to wait."""
    return STALLS.get(reason, "#6f4e7c")
