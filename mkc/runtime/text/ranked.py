"""Vocabularies in `tiktoken.model`: a list of byte strings by rank, run by `tiktoken`."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from pathlib import Path
from re import Pattern
from re import compile as compile_pattern

from tiktoken import Encoding

from mkc.errors import TokenizerFileError
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.text.tokenizer import TokenizerFacts

# The regular expressions of the package run out of stack on a run of white space of a few hundred
# thousand characters (measured with tiktoken 0.14) and would end the process. Runs this long are
# no text; they are cut.
LONGEST_RUN = 25_000
RUN = compile_pattern(r"\s+|\S+")


def too_long(most: int) -> Pattern[str]:
    """Finds a run of more than `most` characters.

    A match can begin only where a run does: from each of its places the search would be quadratic.
    """
    return compile_pattern(rf"(?<!\s)\s{{{most}}}\s|(?<!\S)\S{{{most}}}\S")


TOO_LONG = too_long(LONGEST_RUN)
BYTES = 256
EXPECTED = "lines of a base64 byte string, a space and its rank"


class RankedTokenizer(Tokenizer):
    """A tokenizer whose text pieces are divided by a pattern and merged by rank."""

    def __init__(
        self, ranks: dict[bytes, int], pattern: str, facts: TokenizerFacts, *, path: Path
    ) -> None:
        """
        Args:
          ranks: byte string to rank; the rank is the id.
          pattern: regular expression whose matches are merged separately.
          facts: special tokens and the rest.
          path: of the ranks, for messages.
        """
        super().__init__(facts)
        self._token_bytes = {rank: raw for raw, rank in ranks.items()}
        try:
            self._encoding = Encoding(
                path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except ValueError as error:
            raise TokenizerFileError(
                path=path,
                problem=f"the pattern {pattern!r} does not compile: {error}",
                expected="the regular expression that the checkpoint was trained with",
            ) from error

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        begin = 0
        for cut in cuts(text):
            ids.extend(self._encoding.encode_ordinary(text[begin:cut]))
            begin = cut
        ids.extend(self._encoding.encode_ordinary(text[begin:]))
        return ids

    def _text_token_bytes(self, token: int) -> bytes | None:
        return self._token_bytes.get(token)


def cuts(text: str) -> list[int]:
    """Where runs of spaces, and of other characters, are cut because they are too long."""
    if TOO_LONG.search(text) is None:  # as nearly always
        return []
    runs = (run.span() for run in RUN.finditer(text))
    return [cut for begin, end in runs for cut in range(begin + LONGEST_RUN, end, LONGEST_RUN)]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Reads a tiktoken file.

    Raises:
      TokenizerFileError: with the line, for a file that is not one.
    """
    ranks: dict[bytes, int] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        problem = error.strerror or str(error)
        raise TokenizerFileError(path=path, problem=problem, expected=EXPECTED) from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            ranks[b64decode(encoded, validate=True)] = int(rank)
        except (ValueError, Base64Error) as error:
            shown = line[:40].decode("latin-1")
            raise TokenizerFileError(
                path=f"{path}:{number}", problem=f"cannot read {shown!r}", expected=EXPECTED
            ) from error
    _check_ranks(ranks, path)
    return ranks


def _check_ranks(ranks: dict[bytes, int], path: Path) -> None:
    missing = [byte for byte in range(BYTES) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerFileError(
            path=path,
            problem=f"there is no token for {len(missing)} bytes, the first is {missing[0]:#04x}",
            expected="a token for every byte",
        )
    if len(set(ranks.values())) != len(ranks):
        raise TokenizerFileError(
            path=path, problem="a rank is given twice", expected="a rank of its own for each token"
        )
