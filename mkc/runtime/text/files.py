"""JSON files of a checkpoint folder."""

from __future__ import annotations

from json import JSONDecodeError
from json import loads
from pathlib import Path
from typing import Any

from mkc.errors import TokenizerFileError


def read_json(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
      TokenizerFileError: it is missing, unreadable or no JSON.
    """
    try:
        return loads(path.read_text(encoding="utf-8"))
    except JSONDecodeError as error:
        raise TokenizerFileError(
            path=f"{path}:{error.lineno}", problem=f"no JSON: {error.msg}", expected="a JSON file"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "cannot be read as UTF-8"
        raise TokenizerFileError(path=path, problem=problem, expected="a JSON file") from error


def read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; an empty one for a file that is not there and is not `required`."""
    if not required and not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise TokenizerFileError(
            path=path, problem=f"holds a {type(value).__name__}", expected="a JSON object"
        )
    return value
