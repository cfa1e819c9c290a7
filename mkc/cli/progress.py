"""A spinner with the time on stderr while something slow runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.progress import SpinnerColumn
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn


@contextmanager
def working(what: str, *, quiet: bool) -> Iterator[None]:
    """Shows `what` during the block, and nothing of it afterwards; only on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield
