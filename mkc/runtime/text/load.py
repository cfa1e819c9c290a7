"""The tokenizer of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from re import fullmatch
from typing import Any

from mkc.errors import TokenizerFileError
from mkc.errors import TokenizerVocabularyError
from mkc.runtime.text.byte_level import ByteLevelTokenizer
from mkc.runtime.text.byte_level import check_kind
from mkc.runtime.text.byte_level import prefix_tokens
from mkc.runtime.text.files import read_object
from mkc.runtime.text.formats import TextFormat
from mkc.runtime.text.formats import load_format
from mkc.runtime.text.ranked import RankedTokenizer
from mkc.runtime.text.ranked import read_ranks
from mkc.runtime.text.tokenizer import SpecialToken
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.text.tokenizer import TokenizerFacts

BYTE_LEVEL_FILE = "tokenizer.json"
RANKED_FILE = "tiktoken.model"
SETTINGS_FILE = "tokenizer_config.json"
# Roles of special tokens that templates refer to.
ROLES = ("bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token")
# What an added token that is not marked as special looks like when it is markup all the same:
# tags of thoughts and tool calls. Runs of spaces, for example, are text.
TAG = r"<\S*>|\[\S*\]"


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """The JSON files of a checkpoint that say something about text; empty where there is none."""

    path: Path
    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    generation: Mapping[str, Any]


def load_tokenizer(
    folder: Path, *, vocab: int | None = None, text_format: TextFormat | None = None
) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
      folder: with `tokenizer.json`, or with `tiktoken.model`; beside it `tokenizer_config.json`,
        `config.json` and `generation_config.json`, as far as they exist.
      vocab: rows of the model's embedding; by default what `config.json` says.
      text_format: what the files do not say; by default the folder's `text_format.json`.

    Raises:
      TokenizerFileError: files are missing, broken or contradict each other.
      TokenizerVocabularyError: a token's id is not below `vocab`.
      UnsupportedTokenizerError: a kind of tokenizer that would not be run exactly.
    """
    files = _Folder(
        path=folder,
        settings=read_object(folder / SETTINGS_FILE),
        config=read_object(folder / "config.json"),
        generation=read_object(folder / "generation_config.json"),
    )
    rows = vocab if vocab is not None else _rows(files.config)
    if (folder / BYTE_LEVEL_FILE).exists():
        return _load_byte_level(files, rows)
    if (folder / RANKED_FILE).exists():
        return _load_ranked(files, rows, text_format or load_format(folder))
    raise TokenizerFileError(
        path=folder,
        problem="there is no tokenizer",
        expected=f"a folder with {BYTE_LEVEL_FILE} or {RANKED_FILE}",
    )


def _load_byte_level(files: _Folder, rows: int | None) -> Tokenizer:
    path = files.path / BYTE_LEVEL_FILE
    description = read_object(path, required=True)
    check_kind(description, path)
    words = description["model"]["vocab"]
    added = [_entry(one, path) for one in description.get("added_tokens") or ()]
    specials = _specials([*added, *_declared(files)], files.path / SETTINGS_FILE)
    ids = words | {one["content"]: token for token, one in added}
    ids |= {one.text: one.id for one in specials}
    prefix = [ids[text] for text in prefix_tokens(description) if text in ids]
    facts = _facts(files, specials, ids, rows=rows, prefix=prefix, path=path)
    return ByteLevelTokenizer(description, facts, path=path)


def _load_ranked(files: _Folder, rows: int | None, text_format: TextFormat) -> Tokenizer:
    path = files.path / RANKED_FILE
    ranks = read_ranks(path)
    pattern = text_format.pattern or files.settings.get("pat_str")
    if not isinstance(pattern, str):
        raise TokenizerFileError(
            path=files.path / SETTINGS_FILE,
            problem="key 'pat_str' is missing, and so is 'pattern' in text_format.json",
            expected="in one of them the regular expression that divides text",
        )
    named = _specials(_declared(files), files.path / SETTINGS_FILE)
    first = max(ranks.values()) + 1
    taken = {one.id for one in named}
    reserved = [
        SpecialToken(text=f"<|reserved_token_{token}|>", id=token)
        for token in range(first, first + text_format.special_slots)
        if token not in taken
    ]
    specials = [*named, *reserved]
    # Parts of characters stay different from each other.
    ids = {raw.decode("utf-8", "surrogateescape"): rank for raw, rank in ranks.items()}
    ids |= {one.text: one.id for one in specials}
    prefix = []
    if files.settings.get("add_bos_token") is True and "bos_token" in files.settings:
        prefix = [ids[text] for text in (_content(files.settings["bos_token"]),) if text in ids]
    facts = _facts(files, specials, ids, rows=rows, prefix=prefix, path=path)
    return RankedTokenizer(ranks, pattern, facts, path=path)


def _facts(
    files: _Folder,
    specials: Sequence[SpecialToken],
    ids: Mapping[str, int],
    *,
    rows: int | None,
    prefix: Sequence[int],
    path: Path,
) -> TokenizerFacts:
    """Checks the ids against the model, and gathers what stops a generation."""
    largest = max(ids, key=lambda text: ids[text], default="")
    size = max(ids.values(), default=-1) + 1
    if rows is not None and size > rows:
        raise TokenizerVocabularyError(path=path, token=largest, token_id=size - 1, vocab=rows)
    names = {role: _content(files.settings[role]) for role in ROLES if files.settings.get(role)}
    stops = _stop_ids(files, ids)
    beyond = [token for token in sorted(stops) if token >= (rows or size)]
    if beyond:
        raise TokenizerFileError(
            path=files.path,
            problem=f"eos_token_id {beyond[0]} is no token",
            expected=f"an id below {rows or size}",
        )
    used = set(ids.values())
    return TokenizerFacts(
        specials=tuple(specials),
        vocab_size=rows or size,
        tokens=len(used),
        holes=tuple(token for token in range(size) if token not in used),
        prefix_ids=tuple(prefix),
        stop_ids=frozenset(stops),
        names=names,
    )


def _stop_ids(files: _Folder, ids: Mapping[str, int]) -> set[int]:
    """What any of the files calls an end: they often name different tokens, and mean all."""
    found: set[int] = set()
    for source in (files.generation, files.config, files.config.get("text_config") or {}):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    eos = _content(files.settings.get("eos_token") or "")
    if eos in ids:
        found.add(ids[eos])
    return found


def _specials(
    added: Iterable[tuple[int, Mapping[str, Any]]], path: Path
) -> tuple[SpecialToken, ...]:
    """The added tokens that are markup; two files may declare the same one."""
    found: dict[str, SpecialToken] = {}
    for token, one in added:
        text = one["content"]
        if not one.get("special") and fullmatch(TAG, text) is None:
            continue
        special = SpecialToken(
            text=text,
            id=token,
            hidden=bool(one.get("special")),
            strips_left=bool(one.get("lstrip")),
            strips_right=bool(one.get("rstrip")),
        )
        if found.setdefault(text, special).id != token:
            raise TokenizerFileError(
                path=path,
                problem=f"token {text!r} has ids {found[text].id} and {token}",
                expected="one id, the same in all files",
            )
    return tuple(found.values())


def _declared(files: _Folder) -> list[tuple[int, Mapping[str, Any]]]:
    """The tokens of `added_tokens_decoder`."""
    path = files.path / SETTINGS_FILE
    entries = files.settings.get("added_tokens_decoder") or {}
    numbered = [(int(token) if token.isdecimal() else None, one) for token, one in entries.items()]
    return [_entry({**one, "id": token}, path) for token, one in numbered]


def _entry(one: Mapping[str, Any], path: Path) -> tuple[int, Mapping[str, Any]]:
    """The id and the description of an added token."""
    token = one.get("id")
    if not isinstance(token, int) or not isinstance(one.get("content"), str):
        raise TokenizerFileError(
            path=path, problem=f"an added token is {one!r}", expected="a number and a 'content'"
        )
    return token, one


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token's text; it is written plainly or as an object."""
    return token if isinstance(token, str) else str(token["content"])


def _rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding according to config.json."""
    rows = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return rows if isinstance(rows, int) else None
