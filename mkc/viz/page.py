"""One self-contained HTML page: style, data and script inside, nothing fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

STATIC = files("mkc.viz") / "static"


def page(
    *, title: str, body: str, document: Mapping[str, Any] | None = None, scripts: tuple[str, ...]
) -> str:
    """A page that shows `document`.

    Args:
      body: HTML of the page's frame.
      document: what the scripts read from the element `data`; the picture's JSON twin.
      scripts: files of `static`, in order.
    """
    data = "" if document is None else _data(document)
    code = "\n".join(static(one) for one in scripts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>\n{static('base.css')}</style>\n</head>\n"
        f"<body>\n{body}\n{data}<script>\n{code}</script>\n</body>\n</html>\n"
    )


def _data(document: Mapping[str, Any]) -> str:
    # `<` would end the element when it starts `</script>`; as an escape it is the same JSON.
    text = compact_json(document).replace("<", "\\u003c")
    return f'<script id="data" type="application/json">{text}</script>\n'


def compact_json(document: Mapping[str, Any]) -> str:
    """The JSON twin's text."""
    return json.dumps(document, separators=(",", ":"))


def static(name: str) -> str:
    """Text of a file of `static`."""
    return (STATIC / name).read_text(encoding="utf-8")


def scheme_and_target(document: Mapping[str, Any]) -> str:
    """`scheme NAME, TARGET` for the head of a page about rounds, else the target alone."""
    target = str(document["target"])
    return target if document["unit"] == "step" else f"scheme {document['scheme']}, {target}"
