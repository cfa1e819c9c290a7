"""docs/checkpoints.md says what the command and the module have."""

from __future__ import annotations

from pathlib import Path
from re import MULTILINE
from re import findall

from mkc import errors
from mkc.cli.main import load_command
from mkc.runtime.checkpoint import READABLE
from mkc.runtime.filling import PORTION_BYTES
from mkc.runtime.layout import PIECE_BYTES
from mkc.runtime.manifest import SAMPLE_BYTES
from mkc.runtime.manifest import SAMPLED_TENSORS

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def table(first_heading: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    lines = PAGE[PAGE.index(f"| {first_heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_option_of_the_command_is_explained() -> None:
    command = load_command("pack")
    options = {
        name
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
        for name in parameter.opts
    }
    assert set(findall(r"--[a-z]+", " ".join(row[0] for row in table("option")))) == options


def test_conversions_are_those_of_the_code() -> None:
    allowed = {(declared, stored) for declared, stored, _ in table("declared")}
    floats = {(one.value, stored) for one, all_ in READABLE.items() for stored in all_}
    assert allowed == floats - {("i32", "I32")}


def test_codes_are_those_of_the_errors() -> None:
    known = {one.code for one in vars(errors).values() if hasattr(one, "code")}
    named = set(findall(r"`(E\d\d\d)`", PAGE))
    assert named == {"E301", "E302", "E303", "E311", "E313"}
    assert named <= known


def test_sizes_are_those_of_the_code() -> None:
    assert f"at most {PIECE_BYTES >> 20} MiB per rank" in PAGE
    assert f"the first {SAMPLE_BYTES >> 10} KiB\nof each tensor" in PAGE
    assert f"or of {SAMPLED_TENSORS} tensors" in PAGE
    assert f"An operand larger than {PORTION_BYTES >> 20} MiB" in PAGE


def test_names_of_the_example_exist() -> None:
    example = PAGE[PAGE.index("```python") :].split("```")[1].removeprefix("python")
    imports = findall(r"^from .*$", example, MULTILINE)
    assert len(imports) == 2
    for line in imports:
        exec(line, {})
