"""What a kernel of speculative rounds cannot be made of."""

from __future__ import annotations

from mkc.driver import CompileRequest
from mkc.driver import compile_graph
from mkc.errors import ConfigFileError
from mkc.errors import RoundsError
from mkc.errors import SchemeOptionError
from tests.draft_goldens import golden_round
from tests.errors.command import Command
from tests.errors.expect import refused

TARGET = "tpu7x:1x1x1"


def test_schemes_of_a_kernel(command: Command) -> None:
    command.refused(SchemeOptionError, "unknown scheme 'eagle'", argv="compile qwen38 --spec eagle")
    for name in ("compile", "verify"):
        command.refused(
            SchemeOptionError,
            "--draft without a scheme that drafts",
            argv=f"{name} qwen38 --spec none --draft drafter",
        )
        command.refused(
            ConfigFileError, "drafter: cannot be read", argv=f"{name} qwen38 --draft drafter"
        )
    command.refused(
        SchemeOptionError,
        "which no file registers",
        argv="compile small.py:decoder --spec dflash2 --no-aot",
    )


def test_more_rounds_than_scalar_memory_holds() -> None:
    """A round reports every row, and two numbers for each sequence."""
    graph = golden_round(sampling=False).graph
    plain = 100_000
    with refused(RoundsError, "rounds"):
        compile_graph(
            CompileRequest(graph=graph, target=TARGET, aot=False, rounds_per_launch=plain)
        )
