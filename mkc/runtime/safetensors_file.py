"""The safetensors file format: headers read, checked and written.

A file is 8 bytes of header length (little endian), a JSON header, and the tensors' bytes without
gaps. Headers are read here and not by the `safetensors` package because NumPy has no bf16 of its
own and packing reads runs of rows straight into its buffers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any
from typing import BinaryIO

from mkc.errors import SafetensorsError

LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes; the limit of the format's reference implementation
PAGE = 4096  # written data starts on a memory page, so that a mapped tensor is aligned
METADATA = "__metadata__"

# Bytes per element. Types that are not here (those smaller than a byte) are read over: their sizes
# are not checked, and a graph that needs such a tensor refuses it by name.
ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is.

    Attributes:
      file: the file that holds it.
      dtype: element type as the format names it, such as `BF16`.
      start: offset of its first byte in the file.
      bytes: its size.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """Contents of one file.

    Attributes:
      bytes: size of the file.
      digest: SHA-256 of the header text: names, types, shapes and places of all tensors.
    """

    path: Path
    bytes: int
    digest: str
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Reads and checks the header. Raises `SafetensorsError`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _header_text(path, file, size)
    except OSError as error:
        raise SafetensorsError(path=path, problem=f"cannot be read ({error.strerror})") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SafetensorsError(path=path, problem=f"its header is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise SafetensorsError(path=path, problem="its header is not a JSON object")
    base = LENGTH_BYTES + len(text)
    tensors = {
        name: _tensor(path, name, entry, base)
        for name, entry in document.items()
        if name != METADATA
    }
    end = max((one.start + one.bytes for one in tensors.values()), default=base)
    if end > size:
        raise SafetensorsError(
            path=path,
            problem=f"is truncated: it has {size} bytes and its header describes {end}",
        )
    return Header(path=path, bytes=size, digest=sha256(text).hexdigest(), tensors=tensors)


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise SafetensorsError(
            path=path, problem=f"is truncated or not safetensors: {size} bytes do not hold a header"
        )
    if length > LARGEST_HEADER:
        raise SafetensorsError(
            path=path, problem=f"has a header of {length} bytes, more than {LARGEST_HEADER}"
        )
    return file.read(length)


def _tensor(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        size = prod(shape) * ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else last - first
        sound = 0 <= first <= last and last - first == size and all(axis >= 0 for axis in shape)
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(
            path=path, problem=f"the header's entry of tensor '{name}' cannot be read"
        ) from error
    if not sound:
        raise SafetensorsError(
            path=path,
            problem=f"tensor '{name}' is {dtype}{list(shape)} at bytes {first} to {last}, "
            f"which is not {size} bytes",
        )
    return StoredTensor(
        name=name, file=path, dtype=dtype, shape=shape, start=base + first, bytes=size
    )


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Length and header of a file that holds tensors one after the other, padded to whole pages.

    Args:
      tensors: (element type, shape) by name, in the order of their bytes.
    """
    document: dict[str, Any] = {}
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + prod(shape) * ELEMENT_BYTES[dtype]
        document[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(document, separators=(",", ":")).encode()
    padded = -(-(LENGTH_BYTES + len(text)) // PAGE) * PAGE - LENGTH_BYTES
    return padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded)
