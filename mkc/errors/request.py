"""What the user asked for: config, model, target, context, batch, mesh, output."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from reprlib import Repr
from typing import ClassVar
from typing import Self

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import at
from mkc.errors.base import listed
from mkc.errors.base import sentence

_SHORT = Repr(maxlist=4, maxdict=4, maxstring=80, maxlong=80, maxother=80)  # of a config's values


class ConfigError(MkcError):
    """Something in a model's config; the concrete classes say what."""

    code: ClassVar[str] = "E100"
    UNNAMED: ClassVar[str] = "config.json: "  # what a loader says, which sees the contents only

    def in_file(self, path: Place) -> Self:
        """The same error, naming the file that the config came from."""
        self.message = f"{path}: {self.message.removeprefix(self.UNNAMED)}"
        return self


class ConfigKeyError(ConfigError):
    """A key that the model needs is not in its config."""

    code: ClassVar[str] = "E101"

    def __init__(
        self, *, key: str, expected: str, config: Place = "config.json", known: Iterable[str] = ()
    ) -> None:
        self.key = key
        present = listed("the config has", known)
        super().__init__(
            f"{config}: key '{key}' is missing; expected {expected}.{present} "
            f"Add '{key}' to the config, or use the config.json that came with the checkpoint."
        )


class ConfigValueError(ConfigError):
    """A key of the config has a value that cannot be right."""

    code: ClassVar[str] = "E102"

    def __init__(
        self, *, key: str, got: object, expected: str, config: Place = "config.json", hint: str = ""
    ) -> None:
        self.key = key
        super().__init__(
            f"{config}: key '{key}' is {_SHORT.repr(got)}; expected {expected}. "
            f"{sentence(hint or f'Correct {key!r} in the config')}"
        )


class UnsupportedFeatureError(ConfigError):
    """The config asks for something that this version of mkc cannot do."""

    code: ClassVar[str] = "E103"

    def __init__(
        self, *, feature: str, key: str, got: object, supported: str, config: Place = "config.json"
    ) -> None:
        self.key = key
        self.feature = feature
        super().__init__(
            f"{config}: key '{key}' is {_SHORT.repr(got)}, which asks for {feature}; mkc does not "
            f"support {feature}. Supported: {supported}. Use a checkpoint without it; a config "
            f"edited to hide it would compute wrong results."
        )


class ConfigFileError(ConfigError):
    """The config file is missing, unreadable or not a JSON object."""

    code: ClassVar[str] = "E104"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected a Hugging Face config.json, one JSON object. "
            f"Pass the file itself or the checkpoint folder that holds it."
        )


# What to compile, and for what.


class UnknownModelError(MkcError):
    """A model name that is not shipped with mkc."""

    code: ClassVar[str] = "E110"

    def __init__(self, *, name: str, known: Iterable[str]) -> None:
        super().__init__(
            f"model '{name}' is not known; known models: {', '.join(sorted(known))}. "
            f"Use one of them, or path/to/file.py:function for a model of your own."
        )


class ModelFileError(MkcError):
    """`path/to/file.py:function` does not lead to a model, or the function raised."""

    code: ClassVar[str] = "E111"

    def __init__(self, *, model: Place, problem: str, expected: str = "", hint: str = "") -> None:
        wanted = expected or "path/to/file.py:function with a function that takes an mkc.Step"
        super().__init__(
            f"{model}: {problem}; expected {wanted}. "
            f"{sentence(hint or 'Correct the path or the function')}"
        )


class UnknownTargetError(MkcError):
    """A target or topology without a data file."""

    code: ClassVar[str] = "E120"

    def __init__(
        self, *, target: str, known: Iterable[str], topologies: Iterable[str] = (), of: str = ""
    ) -> None:
        if of:
            super().__init__(
                f"target '{target}': {of} has no such topology; known topologies of {of}: "
                f"{', '.join(topologies)}. Write the target as {of}:TOPOLOGY with one of them."
            )
            return
        topology_list = listed("topologies", topologies)
        super().__init__(
            f"target '{target}' is not known; known targets: {', '.join(sorted(known))}."
            f"{topology_list} Write it as NAME or NAME:TOPOLOGY."
        )


class DeviceCountError(MkcError):
    """A number of ranks that the topology does not have."""

    code: ClassVar[str] = "E121"

    def __init__(
        self,
        *,
        tp: int,
        target: str,
        devices: int,
        possible: Sequence[int] = (),
        larger: Sequence[str] = (),
    ) -> None:
        self.tp = tp
        self.target = target
        self.devices = devices
        values = ", ".join(str(value) for value in possible)
        choices = [f"one of --tp {values}"] if possible else []
        choices += [f"a topology for tp {tp} with --target: {', '.join(larger)}"] if larger else []
        hint = f"Choose {' or '.join(choices)}" if choices else "Choose another target"
        super().__init__(
            f"tp {tp} does not fit target '{target}', which has {devices} devices; expected 1 to "
            f"{devices}. {hint}."
        )

    def advise(self, *, possible: Sequence[int], larger: Sequence[str]) -> DeviceCountError:
        """The same error with what works, for a caller that has tried it.

        Args:
          possible: tp values of this target.
          larger: topologies that take as many ranks.
        """
        return DeviceCountError(
            tp=self.tp,
            target=self.target,
            devices=self.devices,
            possible=possible,
            larger=larger,
        )


class ContextError(MkcError):
    """A context length that the caches cannot represent."""

    code: ClassVar[str] = "E130"

    def __init__(self, *, context: int, expected: str, hint: str) -> None:
        super().__init__(f"context {context} cannot be used: expected {expected}. {sentence(hint)}")


class BatchError(MkcError):
    """A batch size outside what one kernel serves."""

    code: ClassVar[str] = "E131"

    def __init__(self, *, batch: int, limit: int = 8) -> None:
        super().__init__(
            f"batch {batch} cannot be used: expected 1 to {limit} independent sequences per "
            f"kernel. Choose a batch in that range, or run several kernels."
        )


class RoundsError(MkcError):
    """More rounds per launch than the scalar memory has room for tokens of."""

    code: ClassVar[str] = "E132"

    def __init__(self, *, rounds: int, batch: int, limit: int) -> None:
        super().__init__(
            f"{rounds} rounds per launch with batch {batch} cannot be used: expected 1 to {limit}, "
            f"so that all tokens of a launch fit the scalar memory. "
            f"Choose --rounds-per-launch in that range."
        )


class ShardingError(MkcError):
    """The mesh does not divide a dimension of the model."""

    code: ClassVar[str] = "E140"

    def __init__(
        self,
        *,
        op: str,
        dimension: str,
        units: int,
        tp: int,
        possible: Sequence[int],
        unit: int = 1,
        location: Place | None = None,
        param: str = "",
        hint: str = "",
    ) -> None:
        self.op = op
        self.dimension = dimension
        self.units = units
        self.tp = tp
        self.possible = tuple(possible)
        self.unit = unit
        self.location = location
        self.param = param
        size = f"{units} units of {unit}" if unit != 1 else f"size {units}"
        values = ", ".join(str(value) for value in possible)
        choices = (
            f"tp values that divide the model: {values}. Choose one of them with --tp, or a "
            f"topology with that many devices."
            if possible
            else "no tp value works for the model. Change its dimensions."
        )
        of_param = f" of parameter '{param}'" if param else ""
        super().__init__(
            f"{at(location)}{op}: tp {tp} does not divide dimension '{dimension}'{of_param} "
            f"({size}); {sentence(hint) if hint else choices}"
        )

    def advise(self, possible: Sequence[int], larger: str) -> ShardingError:
        """The same error with what works, for a caller that has tried it.

        Args:
          possible: tp values of this topology.
          larger: options that lead to more devices, empty for none that work.
        """
        hint = ""
        if possible:
            values = ", ".join(str(value) for value in possible)
            hint = f"tp values that work on this topology: {values}. Choose one of them with --tp"
        elif larger:
            hint = f"no tp value works on this topology. Use {larger}"
        elif self.possible:
            hint = "no tp value works on this target. Choose another target, or a smaller model"
        return ShardingError(
            op=self.op,
            dimension=self.dimension,
            units=self.units,
            tp=self.tp,
            possible=self.possible,
            unit=self.unit,
            location=self.location,
            param=self.param,
            hint=hint,
        )


class TileError(MkcError):
    """One rank's share of a contracted dimension does not fill whole memory tiles.

    `length` is that share, `whole` the dimension.
    """

    code: ClassVar[str] = "E141"

    def __init__(
        self,
        *,
        op: str,
        length: int,
        whole: int,
        multiple: int,
        location: Place | None,
        param: str,
        dimension: str = "",
        hint: str = "",
    ) -> None:
        self.op = op
        self.length = length
        self.multiple = multiple
        self.location = location
        self.param = param
        self.dimension = dimension
        self.whole = whole
        of_dimension = f" of dimension '{dimension}'" if dimension else ""
        needed = multiple * (whole // length)
        padding = f"Make the whole dimension, which is {whole}, a multiple of {needed}"
        super().__init__(
            f"{at(location)}{op}: parameter '{param}' has {length} input columns{of_dimension} on "
            f"each rank; expected a multiple of {multiple}, so that weight rows fill whole memory "
            f"tiles. {sentence(hint or padding)}"
        )

    def advise(self, hint: str) -> TileError:
        """The same error with another advice, for a caller that has tried it."""
        return TileError(
            op=self.op,
            length=self.length,
            whole=self.whole,
            multiple=self.multiple,
            location=self.location,
            param=self.param,
            dimension=self.dimension,
            hint=hint,
        )


# Memory.


class OutputError(MkcError):
    """The output folder cannot be written."""

    code: ClassVar[str] = "E160"

    def __init__(self, *, path: Place, problem: str, hint: str = "") -> None:
        super().__init__(
            f"output folder {path}: {problem}; expected a new or empty folder, or one that an "
            f"earlier mkc compile wrote. {sentence(hint or 'Choose another folder with --out')}"
        )


class AheadOfTimeError(MkcError):
    """The TPU compiler refused the kernel, or is not there."""

    code: ClassVar[str] = "E170"

    LINES: ClassVar[int] = 8  # the compiler's own explanation is in its first lines

    def __init__(self, *, target: str, message: str, hint: str = "") -> None:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        shown = "".join(f"\n  {line}" for line in lines[: self.LINES])
        advice = hint or (
            "Compile with --no-aot to get kernel.py without this step, and report the message"
        )
        super().__init__(
            f"target '{target}': ahead-of-time compilation failed; expected the TPU compiler to "
            f"accept the generated kernel. {sentence(advice)} The compiler said:{shown}"
        )
