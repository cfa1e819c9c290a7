"""Golden files: text that a test compares byte for byte. `README.md` beside this file says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
OPTION = "--refresh-golden"

type GoldenCheck = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="write the golden files instead of comparing with them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> GoldenCheck:
    """`golden("graph/small.mkc", text)` fails unless the file holds exactly `text`."""
    refresh = bool(request.config.getoption(OPTION))

    def check(name: str, text: str) -> None:
        path = FOLDER / name
        if refresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        assert path.is_file(), f"{path} is missing; write it with pytest {OPTION} and read it"
        stored = path.read_bytes().decode()
        assert text == stored, f"{path} differs; if this is intended run pytest {OPTION}"

    return check
