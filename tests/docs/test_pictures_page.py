"""docs/pictures.md names what the commands write and take."""

from __future__ import annotations

from pathlib import Path
from re import findall

from mkc import errors
from mkc.cli.compile import Emit
from mkc.cli.main import COMMANDS
from mkc.viz.names import DRAWN
from mkc.viz.names import IMAGES
from mkc.viz.names import TRACE

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pictures.md").read_text(encoding="utf-8")


def test_every_picture_is_described() -> None:
    named = {
        name for row in findall(r"(?m)^\| (`.*?) \|", PAGE) for name in findall(r"`(.+?)`", row)
    }
    assert {*DRAWN.values(), *IMAGES, TRACE} <= named


def test_every_stage_is_described() -> None:
    assert set(findall(r"(?m)^\| `(\w+)` \|", PAGE)) == {one.value for one in Emit}


def test_commands_exist() -> None:
    assert set(findall(r"\.venv/bin/mkc (\w+)", PAGE)) <= set(COMMANDS)


def test_codes_are_those_of_the_errors() -> None:
    known = {one.code for one in vars(errors).values() if hasattr(one, "code")}
    assert set(findall(r"`(E\d\d\d)`", PAGE)) == {code for code in known if "E340" <= code < "E350"}


def test_images_are_there_and_small() -> None:
    for name in findall(r"!\[.*?\]\((.+?)\)", PAGE):
        assert 10_000 < (DOCS / name).stat().st_size < 150_000
