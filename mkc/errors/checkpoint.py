"""Checkpoints and packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from typing import ClassVar
from typing import NamedTuple

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import sentence
from mkc.errors.base import size
from mkc.errors.tensor_names import grouped_names

MOST_NAMES = 8  # of tensors, or of their prefixes, in a line


class CheckpointError(MkcError):
    """A checkpoint that is not there or has no weights that mkc reads."""

    code: ClassVar[str] = "E300"

    def __init__(self, *, name: Place, problem: str, hint: str) -> None:
        super().__init__(f"checkpoint {name}: {problem}. {sentence(hint)}")


class SafetensorsError(MkcError):
    """A safetensors file that cannot be read."""

    code: ClassVar[str] = "E301"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected a whole safetensors file. "
            f"Get the file again from where the checkpoint came from."
        )


class TensorDifference(NamedTuple):
    """What is wrong with a tensor; a tuple, since there may be half a million to compare.

    Attributes:
      kind: `missing`, `wrong shape`, `wrong type` or `extra`.
      tensor: its name in the checkpoint.
      detail: what follows its name: what it is, and what was expected.
    """

    kind: str
    tensor: str
    detail: str = ""


class CheckpointMismatchError(MkcError):
    """The tensors of a checkpoint are not those of the model; all differences are listed.

    Those that are the same but for numbers in the names share a line: a wrong config may be wrong
    in hundreds of thousands of tensors. Tensors that the model does not name are no difference, but
    say what may be there instead.

    Attributes:
      differences: each of them alone, sorted.
    """

    code: ClassVar[str] = "E302"

    def __init__(
        self,
        *,
        name: Place,
        model: str,
        differences: Sequence[TensorDifference],
        extra: Sequence[str] = (),
    ) -> None:
        self.differences = tuple(sorted(differences))
        lines = "".join(f"\n  {one}" for one in _lines(self.differences))
        if extra:
            lines += f"\n  not named by the model: {_summarised(extra)}"
        super().__init__(
            f"checkpoint {name} does not fit model '{model}'; all differences ({len(differences)}) "
            f"are below. Use the config.json that came with the checkpoint, or a checkpoint of the "
            f"model.{lines}"
        )


def _lines(differences: Sequence[TensorDifference]) -> Iterator[str]:
    """All differences; a line for those that are alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in differences:
        alike.setdefault((one.kind, one.detail), []).append(one.tensor)
    lines = [
        (kind, written, f" ({count} tensors)" if count > 1 else "", detail)
        for (kind, detail), names in alike.items()
        for written, count in grouped_names(names)
    ]
    for kind, written, count, detail in sorted(lines):
        yield f"{kind}: {written}{count}{detail}"


def _summarised(names: Sequence[str]) -> str:
    """Tensor names, or where they are many the longest prefixes that are few, with counts."""
    found = ""
    for depth in range(1, 1 + max(one.count(".") + 1 for one in names)):
        groups: dict[str, list[str]] = {}
        for one in sorted(names):
            groups.setdefault(".".join(one.split(".")[:depth]), []).append(one)
        if len(groups) > MOST_NAMES:
            break
        found = ", ".join(
            members[0] if len(members) == 1 else f"{prefix}.* ({len(members)})"
            for prefix, members in groups.items()
        )
    return found or f"{len(names)} tensors, such as {', '.join(sorted(names)[:3])}"


class ScaleByteError(MkcError):
    """A scale of 4-bit weights that is no power of two in f32."""

    code: ClassVar[str] = "E303"

    def __init__(self, *, name: Place, tensor: str, index: tuple[int, ...], byte: int) -> None:
        super().__init__(
            f"checkpoint {name}: tensor '{tensor}' has the scale byte {byte} at {list(index)}; "
            f"expected 1 to 254, which stand for 2^(byte - 127). "
            f"Get the file again from where the checkpoint came from."
        )


class PackedFolderError(MkcError):
    """A folder that is not, or cannot become, a folder of packed weights."""

    code: ClassVar[str] = "E310"

    def __init__(self, *, path: Place, problem: str, hint: str) -> None:
        super().__init__(f"packed folder {path}: {problem}. {sentence(hint)}")


class PackedMismatchError(MkcError):
    """A folder was packed for something else; the first difference is named."""

    code: ClassVar[str] = "E311"

    def __init__(self, *, path: Place, what: str, packed: object, expected: object) -> None:
        super().__init__(
            f"packed folder {path} was packed for something else: {what} is {packed}; expected "
            f"{expected}. Pack again into another folder, or remove this one."
        )


class PackedDamagedError(MkcError):
    """A packed file does not have the contents that were written."""

    code: ClassVar[str] = "E312"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected the bytes that mkc pack wrote. "
            f"Remove the folder and pack again."
        )


class DiskFullError(MkcError):
    """There is no room for packed weights; what was finished stays and is continued."""

    code: ClassVar[str] = "E313"

    def __init__(self, *, path: Place, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"packed folder {path}: the disk is full; expected room for {size(needed_bytes)} "
            f"more, it has {size(free_bytes)}. Free some space and run the same command again: it "
            f"continues where it stopped."
        )
