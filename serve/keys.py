"""API keys: kept as digests, compared in constant time, known by a label."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from re import fullmatch

from mkc.errors import ServerOptionError

HASHED = "sha256:"
LABEL = r"[A-Za-z0-9_.-]{1,64}"


class ApiKeys:
    """Attributes:
    labels: in the order in which the keys were given.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        """
        Args:
          keys: label and key; `sha256:` and 64 hexadecimal digits are the digest of a key.

        Raises:
          ServerOptionError: a key is empty, or a digest is none.
        """
        self._digests = [(label, _digest(key)) for label, key in keys]
        self.labels = tuple(label for label, _ in self._digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: str) -> str | None:
        """The label of a key, None for one that is not known; all are compared, whatever comes."""
        given = sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for label, digest in self._digests:
            if compare_digest(digest, given):
                found = label
        return found


def read_keys(given: Iterable[str], *, file: Path | None, environment: str | None) -> ApiKeys:
    """Keys of the command line, then of a file, then of the environment.

    Each is `KEY` or `LABEL=KEY`; a file has one per line, with `#` for remarks, an environment
    variable has them with white space between them.

    Raises:
      ServerOptionError: the file cannot be read, or a key is empty.
    """
    words = [*given, *_lines(file), *(environment or "").split()]
    return ApiKeys(_labelled(word, place) for place, word in enumerate(words, start=1))


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ServerOptionError(
            problem=f"--api-key-file {file} cannot be read ({type(error).__name__})",
            expected="a text file with a key on each line",
            hint="Correct the path or its permissions",
        ) from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise ServerOptionError(
            problem=f"--api-key-file {file} has no key",
            expected="a key on at least one line",
            hint="Add one, or leave the option out to serve without keys",
        )
    return found


def _labelled(word: str, place: int) -> tuple[str, str]:
    label, separator, key = word.partition("=")
    if separator and fullmatch(LABEL, label):
        return label, key
    return f"key{place}", word


def _digest(key: str) -> bytes:
    if key.startswith(HASHED):
        digits = key.removeprefix(HASHED)
        if fullmatch(r"[0-9a-f]{64}", digits):
            return bytes.fromhex(digits)
        raise ServerOptionError(
            problem="an API key begins with 'sha256:' and is no digest",
            expected="64 hexadecimal digits behind it",
            hint="Write the digest that sha256sum prints of the key without a line end",
        )
    if not key:
        raise ServerOptionError(
            problem="an API key is empty",
            expected="at least one character",
            hint="Leave the option out to serve without keys",
        )
    return sha256(key.encode()).digest()
