"""The form of plan.json: records as JSON objects, and digests that show a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from mkc.ir.ops import Op

PLAN_VERSION = 8  # a reader refuses another one
DIGEST = "digest"  # key of plan.json and report.json
OF_PLAN = "plan"  # key of report.json: the digest of its plan
RECORD = "record"  # key that names the dataclass of an object


def plain(value: Any) -> Any:
    """Dataclasses as objects with their name, enumerations as text: what JSON can hold."""
    if isinstance(value, Op):
        return {"op": value.mnemonic, **_members(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {RECORD: type(value).__name__, **_members(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def _members(record: Any) -> dict[str, Any]:
    return {part.name: plain(getattr(record, part.name)) for part in fields(record)}


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document's contents, its own `digest` left out."""
    contents = {key: value for key, value in document.items() if key != DIGEST}
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
