"""The output folder of `mkc compile`. It appears complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from mkc.driver import CompileResult
from mkc.errors import OutputError

KERNEL = "kernel.py"
PLAN = "plan.json"
REPORT = "report.json"
GRAPH = "graph.txt"
PROGRAM = "program.txt"
OURS = frozenset({KERNEL, PLAN, REPORT, GRAPH, PROGRAM, "__pycache__"})
FOLDER_MODE = 0o755  # a temporary folder is private; the finished one is not


def default_folder(model: str, target: str, batch: int, context: int) -> Path:
    """`build/<model>-<target>-b<batch>-c<context>` in the current directory."""
    short = Path(model.rpartition(":")[0]).stem if ":" in model else model
    return Path("build", f"{short}-{target.replace(':', '-')}-b{batch}-c{context}")


def check_folder(folder: Path) -> None:
    """Refuses what mkc must not replace. Raises `OutputError`."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(path=folder, problem="is a file")
    names = {entry.name for entry in folder.iterdir()}
    foreign = sorted(names - OURS)
    if foreign:
        raise OutputError(path=folder, problem=f"holds files mkc did not write: {foreign[0]}")
    if names and REPORT not in names:
        raise OutputError(path=folder, problem=f"has no {REPORT}, so mkc did not write it")


def write_folder(folder: Path, result: CompileResult) -> None:
    """Writes the files next to `folder`, then puts them in its place. Raises `OutputError`."""
    check_folder(folder)
    texts = {
        KERNEL: result.kernel_source,
        PLAN: json_text(result.plan),
        REPORT: json_text(result.report),
        GRAPH: result.graph_text,
        PROGRAM: result.program_text,
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise OutputError(path=folder, problem=f"cannot be made ({error.strerror})") from error
    try:
        fresh = scratch / "new"
        fresh.mkdir(mode=FOLDER_MODE)
        for name, text in texts.items():
            (fresh / name).write_text(text, encoding="utf-8")
        if folder.exists():
            os.replace(folder, scratch / "old")
        os.replace(fresh, folder)
    except OSError as error:
        raise OutputError(path=folder, problem=f"cannot be written ({error.strerror})") from error
    finally:
        rmtree(scratch)


def json_text(document: Mapping[str, Any]) -> str:
    """JSON as mkc writes it."""
    return json.dumps(document, indent=2) + "\n"
