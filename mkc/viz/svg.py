"""SVG elements as text: numbers rounded alike, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'


def number(value: float) -> str:
    """At most two decimals, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def tag(name: str, inside: str = "", /, **attributes: object) -> str:
    """`<name ...>inside</name>`; `_` in an attribute's name stands for `-`, a last one is left out.

    `inside` is markup; use `text` for what is not.
    """
    parts = [name]
    for key, value in attributes.items():
        written = number(value) if isinstance(value, int | float) else escape(str(value))
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{written}"')
    return f"<{' '.join(parts)}>{inside}</{name}>" if inside else f"<{' '.join(parts)}/>"


def rect(
    x: float, y: float, width: float, height: float, *, fill: str, title: str = "", **more: object
) -> str:
    """A rectangle; `title` is what the pointer shows."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return tag(
        "rect", inside, x=x, y=y, width=max(0.0, width), height=max(0.0, height), fill=fill, **more
    )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", title: str = "", **more: object
) -> str:
    """One line of text; `title` is what the pointer shows."""
    inside = escape(words) + (f"<title>{escape(title)}</title>" if title else "")
    return tag("text", inside, x=x, y=y, text_anchor=anchor, **more)


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str, **more: object) -> str:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)


def drawing(width: float, height: float, parts: Iterable[str], *, label: str) -> str:
    """A whole SVG document; `label` is read out by screen readers."""
    return tag(
        "svg",
        "\n" + "\n".join(parts) + "\n",
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {number(width)} {number(height)}",
        font_family=FONT,
        font_size=12,
        role="img",
        aria_label=label,
    )


def fitted(words: str, width: float, size: float = 11.0) -> str:
    """`words` cut to about `width` pixels; empty when nothing useful fits."""
    room = int(width / (size * 0.58))
    if len(words) <= room:
        return words
    return words[: room - 1] + "\u2026" if room > 3 else ""
