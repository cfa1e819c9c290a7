"""Calls of a backend as bytes: JSON, with the bytes of arrays in base64."""

from __future__ import annotations

import json
from base64 import b64decode
from base64 import b64encode
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import numpy as np

CLOSE = "close"  # not a call: there are no more
DTYPE, SHAPE, BYTES = "dtype", "shape", "bytes"


@dataclass(frozen=True, kw_only=True)
class Call:
    """Attributes:
    name: of a method of `Backend`, or CLOSE.
    arguments, options: as it is called; numbers, sequences and arrays. Sequences become lists.
    forgotten: numbers of snapshots that nobody needs any more.
    """

    name: str
    arguments: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    forgotten: Sequence[int] = ()

    def encode(self) -> bytes:
        document = [self.name, self.arguments, self.options, self.forgotten]
        return json.dumps(document, default=_plain).encode()

    @classmethod
    def decode(cls, message: bytes) -> Call:
        name, arguments, options, forgotten = json.loads(message, object_hook=_restored)
        return cls(name=name, arguments=arguments, options=options, forgotten=forgotten)


def _plain(value: Any) -> Any:
    """A NumPy number or array in the terms of JSON."""
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray), f"a {type(value).__name__} in a call"
    content = b64encode(value.tobytes()).decode()
    return {DTYPE: value.dtype.str, SHAPE: value.shape, BYTES: content}


def _restored(found: dict[str, Any]) -> Any:
    """The array that an object stands for, or the object."""
    if found.keys() != {DTYPE, SHAPE, BYTES}:
        return found
    flat = np.frombuffer(b64decode(found[BYTES]), np.dtype(found[DTYPE]))
    return flat.reshape(found[SHAPE])
