"""API keys: where they come from, and how they are compared."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import pytest

from mkc.errors import ServerOptionError
from serve import keys
from serve.keys import ApiKeys
from serve.keys import read_keys


def test_keys_of_all_places(tmp_path: Path) -> None:
    digest = sha256(b"hidden").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# of the team\nalice=first\n\nbob=sha256:{digest}\n", encoding="utf-8")
    found = read_keys(["plain", "carol=third"], file=file, environment="dave=fourth fifth")
    assert found.labels == ("key1", "carol", "alice", "bob", "dave", "key6")
    owners = [found.owner(one) for one in ("plain", "third", "first", "hidden", "fourth", "fifth")]
    assert owners == list(found.labels)
    assert found.owner(f"sha256:{digest}") is None, "the digest is no key"


def test_no_key_is_kept() -> None:
    found = ApiKeys([("alice", "correct-horse")])
    assert "correct-horse" not in repr(vars(found))


def test_every_key_is_compared_in_constant_time() -> None:
    found = ApiKeys([("a", "one"), ("b", "two"), ("c", "three")])
    for given in ("one", "three", "", "other", "ünïcode \udcff"):
        with patch.object(keys, "compare_digest", wraps=keys.compare_digest) as compare:
            found.owner(given)
        assert compare.call_count == 3
        assert {len(part) for call in compare.call_args_list for part in call.args} == {32}


def test_base64_padding_is_no_label() -> None:
    assert read_keys(["ab+/cd=="], file=None, environment=None).owner("ab+/cd==") == "key1"


@pytest.mark.parametrize("word", ["", "alice=", "sha256:12"])
def test_what_is_no_key(word: str) -> None:
    with pytest.raises(ServerOptionError):
        read_keys([word], file=None, environment=None)


def test_a_file_without_keys(tmp_path: Path) -> None:
    """It does not open the server to everyone."""
    empty = tmp_path / "keys"
    empty.write_text("# none\n", encoding="utf-8")
    for file in (empty, tmp_path / "missing"):
        with pytest.raises(ServerOptionError):
            read_keys([], file=file, environment=None)
