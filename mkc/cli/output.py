"""The output folder of `mkc compile`. It appears complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from mkc.driver import CompileResult
from mkc.errors import EmitError
from mkc.errors import OutputError
from mkc.errors import PicturesError
from mkc.plan.folder import KERNEL
from mkc.plan.folder import PLAN
from mkc.plan.folder import REPORT
from mkc.viz.names import FILES

GRAPH = "graph.txt"
PROGRAM = "program.txt"
BYTE_CODE = "__pycache__"  # from running the kernel
PICTURES = "viz"  # from mkc viz
OURS = frozenset({KERNEL, PLAN, REPORT, GRAPH, PROGRAM, BYTE_CODE, PICTURES})
REPORT_KEYS = frozenset({"model", "target", "ranks", "launches", "floor_us", "vmem"})
SCRATCH_PREFIX = ".mkc-"
FOLDER_MODE = 0o755  # a temporary folder is private; the finished one is not


def default_folder(model: str, target: str, batch: int, context: int) -> Path:
    """`build/<model>-<target>-b<batch>-c<context>` in the current directory."""
    short = Path(model.rpartition(":")[0]).stem if ":" in model else model
    return Path("build", f"{short}-{target.replace(':', '-')}-b{batch}-c{context}")


def check_folder(folder: Path) -> None:
    """Refuses what mkc must not replace. Raises `OutputError`."""
    try:
        _check(folder, folder)
    except OSError as error:
        raise OutputError(path=folder, problem=f"cannot be used ({error.strerror})") from error


def _check(folder: Path, named: Path) -> None:
    """`named` is what messages call the folder."""
    if not folder.is_symlink() and not folder.exists():
        return
    if not folder.is_dir() and not folder.is_symlink():
        raise OutputError(path=named, problem="is a file")
    if not folder.exists():
        return  # a link to a folder that is still to be made
    names = {entry.name for entry in folder.iterdir()}
    foreign = sorted(names - OURS) or sorted(
        name for name in names if (folder / name).is_symlink() or not _looks_ours(folder / name)
    )
    if foreign:
        raise OutputError(path=named, problem=f"holds files mkc did not write: {foreign[0]}")
    if names and not _is_report(folder / REPORT):
        raise OutputError(path=named, problem=f"has no {REPORT} of mkc, so mkc did not write it")


def _looks_ours(entry: Path) -> bool:
    """True for a plain file, and for folders of nothing but the kernel's byte code or pictures."""
    if entry.name == PICTURES:
        return entry.is_dir() and all(
            one.is_file() and one.name in FILES for one in entry.iterdir()
        )
    if entry.name != BYTE_CODE:
        return entry.is_file()
    return entry.is_dir() and all(
        one.is_file() and one.name.startswith(f"{Path(KERNEL).stem}.") for one in entry.iterdir()
    )


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        report = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # neither JSON nor text
        return False
    return isinstance(report, dict) and report.keys() >= REPORT_KEYS


def write_folder(folder: Path, result: CompileResult) -> None:
    """Writes the files next to `folder`, then puts them in its place. Raises `OutputError`.

    When `folder` is a symbolic link the place is where it leads.
    """
    check_folder(folder)
    texts = {
        KERNEL: result.kernel_source,
        PLAN: json_text(result.plan),
        REPORT: json_text(result.report),
        GRAPH: result.graph_text,
        PROGRAM: result.program_text,
    }
    try:
        place = Path(os.path.realpath(folder))
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(mkdtemp(prefix=SCRATCH_PREFIX, dir=place.parent))
    except OSError as error:
        raise OutputError(path=folder, problem=f"cannot be made ({error.strerror})") from error
    fresh, old = scratch / "new", scratch / "old"
    try:
        try:
            fresh.mkdir(mode=FOLDER_MODE)
            for name, text in texts.items():
                (fresh / name).write_text(text, encoding="utf-8")
            _exchange(fresh, place, old, folder)
        finally:
            if os.path.exists(place) or not old.exists():  # else it holds the only copy
                rmtree(scratch)
    except OSError as error:
        raise OutputError(path=folder, problem=f"cannot be written ({error.strerror})") from error


def _exchange(fresh: Path, place: Path, old: Path, named: Path) -> None:
    """Puts `fresh` in its place and what was there in `old`; all stays when that fails."""
    if not place.exists():
        os.replace(fresh, place)
        return
    os.replace(place, old)
    try:
        _check(old, named)  # somebody may have put a file there since the first look
        os.replace(fresh, place)
    except (OSError, OutputError):
        os.replace(old, place)
        raise


def write_pictures(folder: Path, contents: Iterable[tuple[str, bytes]]) -> list[str]:
    """Writes files into a folder, which may hold others. Raises `PicturesError`.

    Everything is drawn before the first file is written, and each file appears complete.

    Returns:
      their names.
    """
    drawn = list(contents)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in drawn:
            fresh = folder / f"{SCRATCH_PREFIX}{name}"
            fresh.write_bytes(content)
            os.replace(fresh, folder / name)
    except OSError as error:
        raise PicturesError(path=folder, problem=error.strerror or str(error)) from error
    return [name for name, _ in drawn]


def emit_text(text: str, file: Path | None) -> None:
    """Prints a text, or writes it to a file. Raises `EmitError`."""
    if file is None:
        print(text.rstrip("\n"))
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EmitError(path=file, problem=error.strerror or str(error)) from error


def json_text(document: Mapping[str, Any]) -> str:
    """JSON as mkc writes it."""
    return json.dumps(document, indent=2) + "\n"
