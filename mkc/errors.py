"""Every error a user can cause.

An error has a stable `code`, and one message: what is wrong, where in the user's input, what was
expected and what to do. The command line prints it as `error[E101]: ...` and leaves with status 2;
anything that is not an `MkcError` is a fault of mkc itself. Codes are never given a second meaning.

    E1xx  what the user asked for: config, model, target, context, batch, mesh, memory, output
    E18x  an op that a part of the compiler does not know
    E19x  text forms and registration
    E2xx  a graph that does not make sense
    E30x  checkpoints
    E31x  packed weights
    E32x  tokenizers, chat templates, stop strings
    E33x  generation
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

# Anything whose `str` is a place in the user's input: an `mkc.ir.graph.Location`, a path, text.
type Place = object

MIB = 1 << 20
GIB = 1 << 30


class MkcError(Exception):
    """Base of all user errors; catch it to report any of them.

    Attributes:
      code: stable identifier of the kind of error.
      message: the whole text, without the code.
    """

    code: ClassVar[str] = "E000"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def report(self) -> str:
        """The form for a terminal: `error[E101]: message`."""
        return f"error[{self.code}]: {self.message}"


# Config of a model.


class ConfigError(MkcError):
    """Something in a model's config; the concrete classes say what."""

    code: ClassVar[str] = "E100"


class ConfigKeyError(ConfigError):
    """A key that the model needs is not in its config."""

    code: ClassVar[str] = "E101"

    def __init__(
        self, *, key: str, expected: str, config: Place = "config.json", known: Iterable[str] = ()
    ) -> None:
        self.key = key
        present = _listed("the config has", known)
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
            f"{config}: key '{key}' is {got!r}; expected {expected}. "
            f"{_sentence(hint or f'Correct {key!r} in the config')}"
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
            f"{config}: key '{key}' is {got!r}, which asks for {feature}; mkc does not support "
            f"{feature}. Supported: {supported}. Use a checkpoint without it; a config edited to "
            f"hide it would compute wrong results."
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
            f"{_sentence(hint or 'Correct the path or the function')}"
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
        topology_list = _listed("topologies", topologies)
        super().__init__(
            f"target '{target}' is not known; known targets: {', '.join(sorted(known))}."
            f"{topology_list} Write it as NAME or NAME:TOPOLOGY."
        )


class DeviceCountError(MkcError):
    """A number of ranks that the topology does not have."""

    code: ClassVar[str] = "E121"

    def __init__(self, *, tp: int, target: str, devices: int, larger: Sequence[str]) -> None:
        choices = f"Topologies with {tp} devices or more: {', '.join(larger)}. " if larger else ""
        super().__init__(
            f"tp {tp} does not fit target '{target}', which has {devices} devices; expected 1 to "
            f"{devices}. {choices}Choose --tp in that range, or another topology."
        )


class ContextError(MkcError):
    """A context length that the caches cannot represent."""

    code: ClassVar[str] = "E130"

    def __init__(self, *, context: int, expected: str, hint: str) -> None:
        super().__init__(
            f"context {context} cannot be used: expected {expected}. {_sentence(hint)}"
        )


class BatchError(MkcError):
    """A batch size outside what one kernel serves."""

    code: ClassVar[str] = "E131"

    def __init__(self, *, batch: int, limit: int = 8) -> None:
        super().__init__(
            f"batch {batch} cannot be used: expected 1 to {limit} independent sequences per "
            f"kernel. Choose a batch in that range, or run several kernels."
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
    ) -> None:
        size = f"{units} units of {unit}" if unit != 1 else f"size {units}"
        of_param = f" of parameter '{param}'" if param else ""
        super().__init__(
            f"{_at(location)}{op}: tp {tp} does not divide dimension '{dimension}'{of_param} "
            f"({size}); tp values that divide the model: "
            f"{', '.join(str(value) for value in possible)}. "
            f"Choose one of them with --tp, or a topology with that many devices."
        )


class TileError(MkcError):
    """One rank's share of a contracted dimension does not fill whole memory tiles."""

    code: ClassVar[str] = "E141"

    def __init__(
        self, *, op: str, length: int, multiple: int, location: Place | None, param: str
    ) -> None:
        super().__init__(
            f"{_at(location)}{op}: parameter '{param}' has {length} input columns on each rank; "
            f"expected a multiple of {multiple}, so that weight rows fill whole memory tiles. "
            f"Choose a smaller --tp, or pad the model's dimension to such a multiple."
        )


# Memory.


@dataclass(frozen=True, kw_only=True)
class LiveBuffer:
    """A buffer that is live where memory use peaks.

    Attributes:
      name: buffer name in the plan.
      op: the op that defines it, as the report names it.
      bytes: padded size.
    """

    name: str
    op: str
    bytes: int


class VmemError(MkcError):
    """The buffers that are live at once do not fit the target's VMEM."""

    code: ClassVar[str] = "E150"

    def __init__(
        self,
        *,
        needed_bytes: int,
        limit_bytes: int,
        live: Sequence[LiveBuffer],
        cheapest_change: str,
        at: Place | None = None,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        self.at = at
        self.cheapest_change = cheapest_change
        self.live = tuple(sorted(live, key=lambda one: (-one.bytes, one.name)))
        peak = f" at {at}" if at is not None else ""
        lines = "".join(
            f"\n  {one.bytes / MIB:8.2f} MiB  {one.name}  ({one.op})" for one in self.live
        )
        super().__init__(
            f"the kernel needs {needed_bytes / MIB:.2f} MiB of VMEM{peak}, the limit is "
            f"{limit_bytes / MIB:.2f} MiB: {(needed_bytes - limit_bytes) / MIB:.2f} MiB too much. "
            f"Cheapest change: {_sentence(cheapest_change)} Buffers live at the peak:{lines}"
        )

    def advise(self, change: str) -> VmemError:
        """The same error with another advice, for a caller that has tried it."""
        return VmemError(
            needed_bytes=self.needed_bytes,
            limit_bytes=self.limit_bytes,
            live=self.live,
            cheapest_change=change,
            at=self.at,
        )


class HbmError(MkcError):
    """Weights and states do not fit the device memory of the chosen topology."""

    code: ClassVar[str] = "E151"

    def __init__(
        self,
        *,
        target: str,
        weight_bytes: int,
        state_bytes: int,
        limit_bytes: int,
        smallest: str | None,
    ) -> None:
        needed = weight_bytes + state_bytes
        advice = (
            f"The smallest topology that holds them is {smallest}"
            if smallest is not None
            else "No topology of this target holds them; lower --context or --batch"
        )
        super().__init__(
            f"target '{target}': each device needs {needed / GIB:.2f} GiB of memory "
            f"({weight_bytes / GIB:.2f} GiB of weights, {state_bytes / GIB:.2f} GiB of states) and "
            f"has {limit_bytes / GIB:.2f} GiB: {(needed - limit_bytes) / GIB:.2f} GiB too much. "
            f"{_sentence(advice)}"
        )


# Output and the TPU compiler.


class OutputError(MkcError):
    """The output folder cannot be written."""

    code: ClassVar[str] = "E160"

    def __init__(self, *, path: Place, problem: str, hint: str = "") -> None:
        super().__init__(
            f"output folder {path}: {problem}; expected a new or empty folder, or one that an "
            f"earlier mkc compile wrote. {_sentence(hint or 'Choose another folder with --out')}"
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
            f"accept the generated kernel. {_sentence(advice)} The compiler said:{shown}"
        )


# Ops, text forms, registration.


class UnsupportedOpError(MkcError):
    """A part of the compiler has no function for an op."""

    code: ClassVar[str] = "E180"

    def __init__(self, *, op: str, facet: str, location: Place | None = None) -> None:
        super().__init__(
            f"{_at(location)}op '{op}' has no {facet}; expected a function registered for it. "
            f"Pass one to mkc.ir.register.register_op, or write the model without the op."
        )


class TextError(MkcError):
    """Text that does not parse as a graph."""

    code: ClassVar[str] = "E190"

    def __init__(
        self, *, line: int, column: int, expected: str, got: str, file: Place = "graph text"
    ) -> None:
        self.line = line
        self.column = column
        super().__init__(
            f"{file}:{line}:{column}: expected {expected}, got {got}. "
            f"Correct the text at this place; docs/graph-ir.md describes the form."
        )


class PassSpecError(MkcError):
    """Text that does not parse as a pipeline of passes, or names what does not exist."""

    code: ClassVar[str] = "E191"

    def __init__(self, *, text: str, problem: str, known: Iterable[str] = ()) -> None:
        choices = _listed("known", known)
        super().__init__(
            f"pass pipeline '{text}': {problem}.{choices} "
            f"Write it as name{{option=value,...}},name,..."
        )


class RegistrationError(MkcError):
    """An op from outside the tree that cannot be registered."""

    code: ClassVar[str] = "E192"

    def __init__(self, *, op: str, problem: str, hint: str) -> None:
        super().__init__(f"cannot register op '{op}': {problem}. {_sentence(hint)}")


# Graphs.


class ShapeError(MkcError):
    """Operands of an op do not fit together."""

    code: ClassVar[str] = "E201"

    def __init__(
        self, *, op: str, location: Place | None, expected: str, got: str, hint: str
    ) -> None:
        super().__init__(f"{_at(location)}{op}: expected {expected}, got {got}. {_sentence(hint)}")
        self.op = op
        self.location = location
        self.expected = expected
        self.got = got
        self.hint = hint

    def at(self, location: Place) -> ShapeError:
        """The same error with a place."""
        return ShapeError(
            op=self.op, location=location, expected=self.expected, got=self.got, hint=self.hint
        )


class GraphError(MkcError):
    """A graph that the verifier rejects."""

    code: ClassVar[str] = "E202"

    def __init__(
        self, *, op: str, location: Place | None, problem: str, expected: str, hint: str
    ) -> None:
        super().__init__(f"{_at(location)}{op}: {problem}; expected {expected}. {_sentence(hint)}")


class TraceError(MkcError):
    """The model's Python uses the tracing interface in a way that builds no graph."""

    code: ClassVar[str] = "E203"

    def __init__(
        self, *, where: str, location: Place | None, problem: str, expected: str, hint: str
    ) -> None:
        super().__init__(
            f"{_at(location)}{where}: {problem}; expected {expected}. {_sentence(hint)}"
        )


class ParamNameError(MkcError):
    """A parameter or state name that cannot be told from another."""

    code: ClassVar[str] = "E204"

    def __init__(self, *, name: str, location: Place | None, problem: str, hint: str) -> None:
        super().__init__(f"{_at(location)}'{name}': {problem}. {_sentence(hint)}")


# Checkpoints and packed weights.


class CheckpointError(MkcError):
    """A checkpoint that is not there or has no weights that mkc reads."""

    code: ClassVar[str] = "E300"

    def __init__(self, *, name: Place, problem: str, hint: str) -> None:
        super().__init__(f"checkpoint {name}: {problem}. {_sentence(hint)}")


class SafetensorsError(MkcError):
    """A safetensors file that cannot be read."""

    code: ClassVar[str] = "E301"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected a whole safetensors file. "
            f"Get the file again from where the checkpoint came from."
        )


class CheckpointMismatchError(MkcError):
    """The tensors of a checkpoint are not those of the model; all differences are listed."""

    code: ClassVar[str] = "E302"

    def __init__(self, *, name: Place, model: str, differences: Sequence[str]) -> None:
        lines = "".join(f"\n  {one}" for one in differences)
        super().__init__(
            f"checkpoint {name} does not fit model '{model}'; all differences ({len(differences)}) "
            f"are below. Use the config.json that came with the checkpoint, or a checkpoint of the "
            f"model.{lines}"
        )


class PackedFolderError(MkcError):
    """A folder that is not, or cannot become, a folder of packed weights."""

    code: ClassVar[str] = "E310"

    def __init__(self, *, path: Place, problem: str, hint: str) -> None:
        super().__init__(f"packed folder {path}: {problem}. {_sentence(hint)}")


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
            f"packed folder {path}: the disk is full; expected room for {needed_bytes / GIB:.2f} "
            f"GiB more, it has {free_bytes / GIB:.2f} GiB. Free some space and run the same "
            f"command again: it continues where it stopped."
        )


# Tokenizers, chat templates, stop strings.


class TokenizerFileError(MkcError):
    """A file of the tokenizer is missing, unreadable or contradicts another."""

    code: ClassVar[str] = "E320"

    def __init__(self, *, path: Place, problem: str, expected: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected {expected}. "
            f"Use the tokenizer files that came with the checkpoint."
        )


class TokenizerVocabularyError(MkcError):
    """The tokenizer has tokens for which the model has no embedding."""

    code: ClassVar[str] = "E321"

    def __init__(self, *, path: Place, token: str, token_id: int, vocab: int) -> None:
        super().__init__(
            f"{path}: token {token!r} has id {token_id}, and the model's vocabulary ends at "
            f"{vocab - 1}; expected a tokenizer whose ids are all below {vocab}. "
            f"Use the tokenizer that came with the checkpoint."
        )


class UnsupportedTokenizerError(MkcError):
    """A kind of tokenizer that mkc cannot run exactly."""

    code: ClassVar[str] = "E322"

    def __init__(self, *, path: Place, part: str, got: object, supported: str) -> None:
        super().__init__(
            f"{path}: {part} is {got!r}, which mkc does not support; expected {supported}. "
            f"Use a checkpoint with such a tokenizer."
        )


class ChatTemplateError(MkcError):
    """The chat template does not parse, or refuses the messages."""

    code: ClassVar[str] = "E323"

    def __init__(self, *, path: Place, line: int | None, problem: str, hint: str = "") -> None:
        self.line = line
        where = f"{path}:{line}" if line is not None else f"{path}"
        advice = hint or "Correct the messages, or pass another template with --chat-template"
        super().__init__(f"{where}: {_sentence(f'chat template: {problem}')} {_sentence(advice)}")


class ChatMessageError(MkcError):
    """A chat message that no template could render."""

    code: ClassVar[str] = "E324"

    def __init__(self, *, where: Place, problem: str, expected: str) -> None:
        self.where = str(where)
        super().__init__(f"{where}: {problem}; expected {expected}. Correct the message.")


class TextFormatError(MkcError):
    """The description of a text format is wrong, or does not fit the tokenizer."""

    code: ClassVar[str] = "E325"

    def __init__(self, *, path: Place, key: str, problem: str, expected: str) -> None:
        self.key = key
        super().__init__(
            f"{path}: key '{key}' {problem}; expected {expected}. "
            f"Correct the description; docs/tokenizers.md lists its keys."
        )


class ChatOptionError(MkcError):
    """A chat option with a value that the model's format does not have."""

    code: ClassVar[str] = "E326"

    def __init__(self, *, option: str, got: object, expected: str) -> None:
        self.option = option
        super().__init__(
            f"chat option '{option}' is {got!r}; expected {expected}. "
            f"Choose one of these values, or leave the option out."
        )


class StopStringError(MkcError):
    """A stop string of no characters."""

    code: ClassVar[str] = "E327"

    def __init__(self, *, strings: Sequence[str]) -> None:
        super().__init__(
            f"stop strings {list(strings)!r}: one of them is empty; expected at least one "
            f"character in each, since every text ends with nothing. Remove the empty one."
        )


# Generation.


class PromptLengthError(MkcError):
    """A prompt, or what was asked for beyond it, that the context does not hold."""

    code: ClassVar[str] = "E330"

    def __init__(self, *, prompt: int, context: int, max_tokens: int | None = None) -> None:
        self.prompt = prompt
        self.context = context
        wanted = f" and {max_tokens} tokens to generate" if max_tokens is not None else ""
        change = "Ask for fewer tokens" if max_tokens is not None else "Shorten the prompt"
        super().__init__(
            f"the prompt has {prompt} tokens{wanted}, the context {context} positions; expected a "
            f"prompt of at most {context - 1} tokens and everything together to fit the context. "
            f"{change}, or compile for a larger --context."
        )


class PromptTokenError(MkcError):
    """A prompt without tokens, or with one that the model does not have."""

    code: ClassVar[str] = "E331"

    def __init__(self, *, problem: str, vocab: int) -> None:
        super().__init__(
            f"the prompt {problem}; expected at least one token id, all from 0 to {vocab - 1}. "
            f"Use the tokenizer that came with the checkpoint."
        )


class GenerationOptionError(MkcError):
    """An option of a request that is out of its range."""

    code: ClassVar[str] = "E332"

    def __init__(self, *, option: str, got: object, expected: str) -> None:
        self.option = option
        super().__init__(
            f"generation option '{option}' is {got!r}; expected {expected}. "
            f"Correct the value, or leave the option out."
        )


class NoTokenAllowedError(MkcError):
    """Allowed tokens, biases and stop rules together leave nothing to choose."""

    code: ClassVar[str] = "E333"

    def __init__(self, *, position: int) -> None:
        super().__init__(
            f"at position {position} no token is allowed; expected at least one that neither the "
            f"mask of allowed tokens nor a logit bias of minus infinity removes. "
            f"Allow more tokens, or let the generation end before."
        )


class NotFiniteLogitsError(MkcError):
    """The model's logits are not numbers."""

    code: ClassVar[str] = "E334"

    def __init__(self, *, position: int) -> None:
        super().__init__(
            f"at position {position} the model's logits are not numbers (NaN or infinity); expected "
            f"finite ones. Look for damaged weights: mkc pack names tensors with a NaN or an infinity."
        )


class BackendError(MkcError):
    """A backend that this machine cannot run."""

    code: ClassVar[str] = "E335"

    def __init__(self, *, backend: str, problem: str, hint: str) -> None:
        super().__init__(f"backend '{backend}': {problem}. {_sentence(hint)}")


def _at(location: Place | None) -> str:
    return f"{location}: " if location is not None else ""


def _sentence(text: str) -> str:
    """`text` with a full stop."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _listed(label: str, names: Iterable[str]) -> str:
    """` label: a, b.` sorted, or nothing when there are no names."""
    listed = ", ".join(sorted(names))
    return f" {label[0].upper()}{label[1:]}: {listed}." if listed else ""
