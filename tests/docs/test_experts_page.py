"""docs/experts-and-latents.md says what is there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from re import MULTILINE
from re import findall

import pytest

import mkc
from mkc.errors import ScaleByteError
from mkc.errors import UnsupportedGraphError
from mkc.ir.ops_experts import EXPERT_OPS
from mkc.ir.ops_mixing import MIXING_OPS
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.routing import Routing
from mkc.passes.expert_layout import ExpertShape
from mkc.passes.expert_layout import layout_cost
from mkc.passes.expert_layout import possible_layouts
from mkc.targets import load_target
from models.kimi_k3 import MODEL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experts-and-latents.md").read_text(encoding="utf-8")


def test_modules_exist() -> None:
    named = findall(r"`(\w+\.py)`", PAGE.split("| where | what |")[1].split("## ")[0])
    assert len(named) >= 10
    assert [one for one in named if not (ROOT / "mkc" / "ir" / one).is_file()] == []


def test_every_operation_is_listed_with_its_attributes() -> None:
    table = PAGE.split("## Operations")[1].split("## Latent")[0]
    rows = findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", table, MULTILINE)
    listed = {name: findall(r"`(\w+)`", attributes) for name, attributes in rows}
    ops = (*EXPERT_OPS, *MIXING_OPS)
    assert listed == {op.mnemonic: [one.name for one in fields(op)] for op in ops}


def test_forms_of_a_cache_are_listed() -> None:
    table = PAGE.split("| `cache` |")[1].split("`with_cache_form")[0]
    assert findall(r"^\| `(\w+)` \|", table, MULTILINE) == [form.value for form in CacheForm]


@pytest.mark.parametrize(("rows", "first"), [(1, 1), (8, 5)])
def test_the_table_of_layouts_is_what_they_cost(rows: int, first: int) -> None:
    """Columns of the page: experts, balance, MB, us; from `first` on those for so many rows."""
    table = PAGE.split("| groups x slices |")[1].split("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    shape = ExpertShape(experts=896, chosen=16, width=3072, inner=3584, is_mxfp4=True)
    layouts = possible_layouts(shape, 32)
    assert [line[0] for line in lines] == [f"{one.groups} x {one.slices}" for one in layouts]
    for line, layout in zip(lines, layouts, strict=True):
        cost = layout_cost(shape, layout, rows, Routing.UNIFORM, load_target("tpu7x:2x2x4"))
        told = [f"{cost.experts:.1f}", f"{cost.balance:.2f}", f"{cost.bytes / 1e6:.1f}"]
        assert line[first : first + 4] == [*told, f"{cost.us:.2f}"]


def test_calls_and_codes_exist() -> None:
    for name in findall(r"`mkc\.(\w+)`", PAGE):
        assert hasattr(mkc, name), name
    assert {ScaleByteError.code, UnsupportedGraphError.code} <= set(findall(r"E\d{3}", PAGE))
    assert MODEL.name == "kimi_k3"


def test_links_lead_somewhere() -> None:
    targets = findall(r"\]\(([\w./-]+)\)", PAGE)
    assert targets
    assert [one for one in targets if not (ROOT / "docs" / one).exists()] == []
