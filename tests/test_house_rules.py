"""Rules of the code base that no tool checks: who may import whom, who may name what."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from re import IGNORECASE
from re import findall

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "mkc").rglob("*.py"))
MODELS = sorted((ROOT / "models").rglob("*.py"))
SERVER = sorted((ROOT / "serve").rglob("*.py"))

# What each part of mkc may import besides itself; a part is the first name behind `mkc.`.
COMPILER = {"codegen_pallas", "passes", "schedule", "model", "ir", "targets", "errors"}
BELOW = {
    "errors": set[str](),
    "ir": {"errors"},
    "model": {"ir", "errors"},
    "spec": {"model", "ir", "errors"},
    "targets": {"errors"},
    "schedule": {"ir", "targets", "errors"},
    "passes": {"schedule", "ir", "targets", "errors"},
    "codegen_pallas": {"passes", "schedule", "ir", "targets", "errors"},
    "plan": {"passes", "schedule", "ir", "targets", "errors"},
    "viz": {"plan", *COMPILER},
    "prompt_blocks": set[str](),
    "hbm_plan": COMPILER,
    "report": {"plan", "prompt_blocks", "hbm_plan", *COMPILER},
    "advice": COMPILER,
    "vmem_trades": COMPILER,
    "driver": COMPILER | {"plan", "report", "advice", "vmem_trades"},
    "runtime": COMPILER | {"prompt_blocks", "hbm_plan", "report", "driver", "spec"},
    "cli": COMPILER | {"plan", "viz", "report", "driver", "runtime", "spec"},
}
MAX_LINES = 550


def part(path: Path) -> str:
    """`passes` for mkc/passes/p10_shard.py, `__init__` for mkc/__init__.py."""
    return path.relative_to(ROOT / "mkc").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20
    assert len(MODELS) >= 2
    assert len(SERVER) > 20


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_imports_go_down_only(path: Path) -> None:
    if part(path) == "__init__":
        return
    allowed = BELOW[part(path)] | {part(path)}
    parts = {module.split(".")[1] for module in imports(path) if module.startswith("mkc.")}
    assert parts <= allowed
    assert "mkc" not in imports(path), "the public surface is for models, not for mkc itself"
    if part(path) != "cli":
        assert not any(module.split(".")[0] == "models" for module in imports(path))


@pytest.mark.parametrize("path", MODELS, ids=name)
def test_models_import_the_public_surface_only(path: Path) -> None:
    assert [module for module in imports(path) if module.startswith(("mkc.", "jax"))] == []


@pytest.mark.parametrize("path", SERVER, ids=name)
def test_the_server_knows_the_runtime_and_no_model(path: Path) -> None:
    modules = list(imports(path))
    assert {one.split(".")[1] for one in modules if one.startswith("mkc.")} <= {"runtime", "errors"}
    assert not {one.split(".")[0] for one in modules} & {"models", "jax", "pickle"}
    text = path.read_text(encoding="utf-8")
    assert findall(r"qwen|kimi|dflash|dspark|llama", text, IGNORECASE) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_the_command_line_names_models(path: Path) -> None:
    if part(path) != "cli":
        text = path.read_text(encoding="utf-8")
        assert findall(r"qwen|kimi|dflash|dspark|llama", text, IGNORECASE) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_only_targets_and_the_command_line_name_chips(path: Path) -> None:
    if part(path) not in ("cli", "targets"):
        text = path.read_text(encoding="utf-8")
        assert findall(r"tpu ?7x?\b|\bv[4-7][epx]\b|tpu ?v\d", text, IGNORECASE) == []


@pytest.mark.parametrize("path", [*SOURCES, *MODELS, *SERVER], ids=name)
def test_nothing_is_left_undone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert findall(r"\bTO" r"DO\b|\bFIX" r"ME\b|\bXX" r"X\b|NotImplemented" r"Error", text) == []
    assert "from __future__ import annotations" in text or not text.strip() or part_is_bare(text)
    assert len(text.splitlines()) <= MAX_LINES


def part_is_bare(text: str) -> bool:
    """True for a file of nothing but a docstring and imports."""
    kinds = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    return all(isinstance(node, kinds) for node in ast.parse(text).body)


def test_test_modules_have_names_of_their_own() -> None:
    """The folders of tests are no packages: two modules of one name are one module to pytest."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
