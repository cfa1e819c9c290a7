"""A Hugging Face checkpoint: a folder of safetensors files with config and tokenizer beside them.

Nothing is read but headers until a tensor is asked for, and a tensor is read alone. No file of a
checkpoint is ever executed or unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mkc.errors import CheckpointError
from mkc.errors import CheckpointMismatchError
from mkc.errors import ConfigFileError
from mkc.errors import SafetensorsError
from mkc.errors import ScaleByteError
from mkc.errors import TensorDifference
from mkc.ir.graph import Graph
from mkc.ir.mxfp4 import bad_scale
from mkc.ir.types import DType
from mkc.runtime.pack import DTYPES
from mkc.runtime.pack import LoadTensor
from mkc.runtime.safetensors_file import Header
from mkc.runtime.safetensors_file import StoredTensor
from mkc.runtime.safetensors_file import read_header
from mkc.runtime.shards import Array

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Stored types that a declared one may be read from. bf16 to f32 is exact, f32 to bf16 rounds to
# nearest even, as the reference implementations do when they load a checkpoint in bf16.
READABLE = {
    DType.BF16: ("BF16", "F32"),
    DType.F32: ("F32", "BF16"),
    DType.I32: ("I32",),
    DType.E2M1X2: ("U8",),
    DType.E8M0: ("U8", "F8_E8M0"),
}
DTYPE_POLICY = "f32 to bf16 rounds to nearest even; bf16 to f32 is exact"
STORED_TYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "I32": np.int32,
    "U8": np.uint8,
    "F8_E8M0": np.uint8,
}


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check found that is no error.

    Attributes:
      extra: tensors that the graph does not name, such as those of a vision tower, sorted.
      converted: tensors stored in another type than the graph declares, sorted.
    """

    extra: tuple[str, ...]
    converted: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An open checkpoint.

    Attributes:
      name: what the user named.
      folder: where its files are.
      revision: commit of the hub, empty for a folder of the user.
      tensors: every stored tensor by name.
      headers: the safetensors files in name order.
    """

    name: str
    folder: Path
    revision: str
    tensors: Mapping[str, StoredTensor]
    headers: tuple[Header, ...]
    _open: dict[Path, int] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, name: str | Path, *, revision: str | None = None) -> Checkpoint:
        """Opens a folder, or a name of the hub, and reads the headers.

        A hub name is looked up as `huggingface_hub` does: cache first, no network where
        HF_HUB_OFFLINE is set.

        Args:
          name: a folder, or OWNER/NAME of the hub, or OWNER/NAME@REVISION.
          revision: branch, tag or commit; of the hub only.

        Raises:
          CheckpointError: there is no such checkpoint or it has no safetensors files.
          SafetensorsError: a file is truncated or not in the format.
        """
        folder = Path(name)
        commit = ""
        if not folder.is_dir():
            # Here, because it is slow to import and a folder of the user needs nothing of it.
            from mkc.runtime.hub import fetch

            folder = fetch(*_pinned(str(name), revision))
            commit = folder.name
        elif revision is not None:
            raise CheckpointError(
                name=name,
                problem=f"is a folder, which has no revision '{revision}'",
                hint="Leave the revision out, or name a checkpoint of the hub",
            )
        tensors, headers = _read_headers(str(name), folder)
        return cls(name=str(name), folder=folder, revision=commit, tensors=tensors, headers=headers)

    def joined(self, other: Checkpoint, *, prefix: str) -> Checkpoint:
        """Both as one checkpoint: the tensors of `other` have `prefix` before their names.

        Config and tokenizer are those of this one.
        """
        prefixed = {prefix + name: stored for name, stored in other.tensors.items()}
        assert not prefixed.keys() & self.tensors.keys(), f"tensors with the prefix '{prefix}'"
        return Checkpoint(
            name=f"{self.name} with {other.name}",
            folder=self.folder,
            revision=" ".join(filter(None, (self.revision, other.revision))),
            tensors={**self.tensors, **prefixed},
            headers=(*self.headers, *other.headers),
        )

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        while self._open:
            os.close(self._open.popitem()[1])

    @property
    def config(self) -> Mapping[str, Any]:
        """Contents of config.json. Raises `ConfigFileError`."""
        path = self.folder / CONFIG
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigFileError(path=path, problem=f"cannot be read ({error})") from error
        if not isinstance(found, dict):
            raise ConfigFileError(path=path, problem="is JSON, but not an object")
        return found

    @property
    def tokenizer_files(self) -> tuple[Path, ...]:
        """Tokenizer and chat template files, by name."""
        patterns = ("tokenizer*", "*.tiktoken", "vocab.*", "merges.txt", "*.jinja")
        return tuple(sorted({path for one in patterns for path in self.folder.glob(one)}))

    def check(self, graph: Graph, *, strict: bool = False) -> CheckReport:
        """Compares the stored tensors with all that the graph names; reads no tensor.

        Args:
          strict: a tensor that the graph does not name is a difference too.

        Raises:
          CheckpointMismatchError: something is missing, misshapen or of a wrong type; lists all.
        """
        named: set[str] = set()
        differences: set[TensorDifference] = set()
        converted: set[str] = set()
        for param in graph.params.values():
            shape, wanted = param.tensor_type.shape, f"expected {param.tensor_type}"
            for name in param.tensor_names():
                named.add(name)
                found = self.tensors.get(name)
                if found is None:
                    differences.add(TensorDifference("missing", name, f", {wanted}"))
                    continue
                detail = f" is {found.dtype}{list(found.shape)}, {wanted}"
                if found.shape != shape:
                    differences.add(TensorDifference("wrong shape", name, detail))
                if found.dtype not in READABLE[param.type.dtype]:
                    differences.add(TensorDifference("wrong type", name, detail))
                elif found.dtype != READABLE[param.type.dtype][0]:
                    converted.add(name)
        extra = sorted(set(self.tensors) - named)
        if strict:
            differences.update(TensorDifference("extra", name) for name in extra)
        if differences:
            raise CheckpointMismatchError(
                name=self.name,
                model=graph.name,
                differences=tuple(differences),
                extra=() if strict else extra,
            )
        return CheckReport(extra=tuple(extra), converted=tuple(sorted(converted)))

    def load(self, name: str) -> Array:
        """A whole tensor in its stored type. Raises `SafetensorsError`."""
        stored = self.tensors[name]
        array = np.empty(stored.shape, STORED_TYPES[stored.dtype])
        self.read_into(stored, 0, array)
        return array

    def loader(self, graph: Graph) -> LoadTensor:
        """`load`, with every tensor in the type that the graph declares.

        It raises `ScaleByteError` for scales that have a byte without a meaning.
        """
        declared = {
            name: param.type.dtype
            for param in graph.params.values()
            for name in param.tensor_names()
        }

        def load(name: str) -> Array:
            array = self.load(name)
            if declared[name] is DType.E8M0:
                index = bad_scale(array)
                if index is not None:
                    raise ScaleByteError(
                        name=self.name, tensor=name, index=index, byte=int(array[index])
                    )
            return array.astype(DTYPES[declared[name]], copy=False)

        return load

    def read_into(self, stored: StoredTensor, offset: int, out: Array) -> None:
        """Fills a contiguous array with the bytes of a tensor from byte `offset` on.

        May be called by several threads at once. Raises `SafetensorsError`.
        """
        assert offset + out.nbytes <= stored.bytes, f"{stored.name}: read past its end"
        view = memoryview(out.reshape(-1).view(np.uint8))
        position = stored.start + offset
        try:
            while len(view):
                count = os.preadv(self._descriptor(stored.file), [view], position)
                if count == 0:
                    raise SafetensorsError(
                        path=stored.file, problem=f"ends inside tensor '{stored.name}'"
                    )
                view = view[count:]
                position += count
        except OSError as error:
            raise SafetensorsError(
                path=stored.file, problem=f"cannot be read ({error.strerror})"
            ) from error

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            descriptor = os.open(path, os.O_RDONLY)
            if self._open.setdefault(path, descriptor) != descriptor:
                os.close(descriptor)  # another thread was faster
        return self._open[path]


def _pinned(name: str, revision: str | None) -> tuple[str, str | None]:
    """Name and revision of a hub checkpoint, which may be given as NAME@REVISION."""
    short, separator, pinned = name.partition("@")
    if not separator:
        return name, revision
    if not pinned or revision not in (None, pinned):
        raise CheckpointError(
            name=name,
            problem=f"has the revision '{revision}' beside it"
            if pinned
            else "has no revision behind the @",
            hint="Name one branch, tag or commit, as OWNER/NAME@REVISION or as --revision",
        )
    return short, pinned


def _read_headers(name: str, folder: Path) -> tuple[dict[str, StoredTensor], tuple[Header, ...]]:
    """All tensors by name, and the files they are in."""
    placed = _index(folder)
    files = sorted({folder / file for file in placed.values()}) or _unindexed(folder)
    if not files:
        pickled = any(next(folder.glob(one), None) for one in ("*.bin", "*.pt", "*.pth"))
        raise CheckpointError(
            name=name,
            problem=f"{folder} has no safetensors files"
            + (", only pickled weights, which mkc never opens" if pickled else ""),
            hint="Name a folder with model.safetensors, or convert the weights to safetensors",
        )
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointError(
            name=name,
            problem=f"{INDEX} names files that are not there: {', '.join(absent)}",
            hint="Download the checkpoint again; only a part of it arrived",
        )
    headers = tuple(read_header(path) for path in files)
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for one, stored in header.tensors.items():
            if placed and placed.get(one, header.path.name) != header.path.name:
                continue  # the index says which of two copies counts
            if one in tensors:
                raise CheckpointError(
                    name=name,
                    problem=f"tensor '{one}' is in {tensors[one].file.name} and {stored.file.name}",
                    hint=f"Remove one of the files, or add {INDEX}",
                )
            tensors[one] = stored
    return tensors, headers


def _unindexed(folder: Path) -> list[Path]:
    """`model.safetensors` alone, or every safetensors file when there is none of that name."""
    single = folder / SINGLE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _index(folder: Path) -> Mapping[str, str]:
    """Tensor name -> file name as the index says, empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        placed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files: Sequence[Any] = list(placed.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SafetensorsError(path=path, problem="is not an index of tensors") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file:
            raise SafetensorsError(path=path, problem=f"names {file!r}, which is no file beside it")
    return dict(placed)
