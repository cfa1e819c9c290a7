"""docs/speculation.md says what is there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from re import MULTILINE
from re import findall

from mkc.ir.ops_markov import MARKOV_OPS
from mkc.ir.ops_spec import SPEC_OPS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")


def test_modules_exist() -> None:
    table = PAGE.split("| where | what |")[1].split("## ")[0]
    named = findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(named) >= 6
    for one in named:
        assert (ROOT / one).exists() or (ROOT / "mkc" / "ir" / one).exists(), one


def test_every_operation_is_listed_with_its_attributes() -> None:
    rows = findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", PAGE.split("## Operations")[1], MULTILINE)
    listed = {name: findall(r"`(\w+)`", attributes) for name, attributes in rows}
    ops = (*SPEC_OPS, *MARKOV_OPS)
    assert listed == {op.mnemonic: [one.name for one in fields(op)] for op in ops}


def test_links_lead_somewhere() -> None:
    targets = findall(r"\]\(([\w./-]+)\)", PAGE)
    assert len(targets) >= 2
    assert [one for one in targets if not (ROOT / "docs" / one).exists()] == []
