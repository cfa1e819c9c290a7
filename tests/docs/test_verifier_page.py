"""`docs/verifier.md` lists every code of the verifier and the lint, as the program knows them."""

from __future__ import annotations

from pathlib import Path

from mkc.schedule.lint import LINTS
from mkc.schedule.verify import CODES

PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"


def section(name: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    return text[text.index(begin) + len(begin) : text.index(end)]


def codes_table() -> str:
    lines = ["| code | must hold | usual cause |", "|---|---|---|"]
    lines += [f"| {code} | {one.holds} | {one.hint} |" for code, one in CODES.items()]
    return "\n".join(lines) + "\n"


def lints_table() -> str:
    lines = ["| code | must hold | on a chip otherwise |", "|---|---|---|"]
    lines += [f"| {code} | {one.holds} | {one.symptom} |" for code, one in LINTS.items()]
    return "\n".join(lines) + "\n"


def test_codes() -> None:
    assert section("codes") == codes_table()


def test_lints() -> None:
    assert section("lints") == lints_table()
