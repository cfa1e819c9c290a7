"""Places in the author's files, as they stand in messages and outputs."""

from __future__ import annotations

import pytest

from mkc.ir.location import portable_path


@pytest.mark.parametrize(
    ("file", "module", "shown"),
    [
        ("/somewhere/family/decoder.py", "family.decoder", "family/decoder.py"),
        ("/somewhere/family/small/decoder.py", "family.small.decoder", "family/small/decoder.py"),
        ("/somewhere/family/__init__.py", "family", "family/__init__.py"),
        ("/somewhere/mine.py", "name_of_a_loader", "mine.py"),
        ("/somewhere/mine.py", "__main__", "mine.py"),
        ("/somewhere/other/decoder.py", "family.decoder", "decoder.py"),
        ("<stdin>", "__main__", "<stdin>"),
    ],
)
def test_a_path_begins_where_its_module_is_imported_from(
    file: str, module: str, shown: str
) -> None:
    assert portable_path(file, module) == shown
