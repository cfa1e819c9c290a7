"""Bad input on the command line: one message on stderr, status 2, no traceback, no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mkc.driver
import models
from mkc.codegen_pallas.aot import AotResult
from mkc.errors import AheadOfTimeError
from mkc.errors import BatchError
from mkc.errors import ConfigFileError
from mkc.errors import ConfigKeyError
from mkc.errors import ConfigValueError
from mkc.errors import ContextError
from mkc.errors import DeviceCountError
from mkc.errors import HbmError
from mkc.errors import MkcError
from mkc.errors import ModelFileError
from mkc.errors import OutputError
from mkc.errors import PassSpecError
from mkc.errors import ShapeError
from mkc.errors import ShardingError
from mkc.errors import TraceError
from mkc.errors import UnknownModelError
from mkc.errors import UnknownTargetError
from mkc.errors import UnsupportedFeatureError
from mkc.errors import VmemError
from mkc.targets import known_targets
from models.qwen38 import MODEL
from tests.errors.command import Command

SHIPPED = Path(models.__path__[0]) / MODEL.default_config
EXAMPLE = Path(models.__path__[0]) / "examples" / "dense.py"

MODEL_FILE = """
import mkc

number = 4

def decoder(step):
    table = mkc.param("embed.weight", [64, 32])
    return mkc.next_token(mkc.embed(step.tokens, table), table)

def raises(step):
    return {}["missing"]

def raises_below(step):
    return int("twelve")

def wrong_shape(step):
    table = mkc.param("embed.weight", [64, 32])
    return mkc.next_token(mkc.linear(mkc.embed(step.tokens, table), table), table)

def wrong_dtype(step):
    table = mkc.param("embed.weight", [64, 32])
    return mkc.next_token(mkc.cast(mkc.embed(step.tokens, table), "f16"), table)

def wrong_option(step):
    return mkc.rms_norm(step.tokens)

def no_outputs(step):
    return None

def exits(step):
    raise SystemExit(5)

def not_finite(step):
    table = mkc.param("embed.weight", [64, 32])
    return mkc.rms_norm(mkc.embed(step.tokens, table), table, eps=float("nan"))

def few_layers(step):
    for layer in mkc.layers(-1):
        pass
"""


@pytest.fixture
def model_file(command: Command) -> Path:
    path = command.folder / "mine.py"
    path.write_text(MODEL_FILE, encoding="utf-8")
    return path


# Which model.


def test_unknown_model(command: Command) -> None:
    message = command.refused(
        UnknownModelError, "'gpt5'", "qwen38", "path/to/file.py:function", argv="compile gpt5"
    )
    assert message.count("\n") == 1


def test_file_that_does_not_exist(command: Command) -> None:
    command.refused(
        ModelFileError,
        "gone.py:decoder",
        "there is no file gone.py",
        argv="compile gone.py:decoder",
    )


@pytest.mark.usefixtures("model_file")
@pytest.mark.parametrize(
    ("function", "error", "fragments"),
    [
        ("nothing", ModelFileError, ("has no 'nothing'", "It has: decoder, exits, few_layers")),
        ("number", ModelFileError, ("'number' is a int, not a function",)),
        ("raises", ModelFileError, ("mine.py:11 raised KeyError", "'missing'")),
        ("raises_below", ModelFileError, ("mine.py:14 raised ValueError", "'twelve'")),
        ("wrong_shape", ShapeError, ("mine.py:18: linear", "in = 64")),
        ("wrong_option", ModelFileError, ("mine.py:25 raised TypeError", "weight")),
        ("exits", ModelFileError, ("mine.py:31 raised SystemExit: 5",)),
        ("not_finite", TraceError, ("mine.py:35: ", "eps is nan", "a finite number of at least 0")),
        ("few_layers", TraceError, ("mine.py:38: ", "the number of layers is -1")),
        ("no_outputs", TraceError, ("mine.py:27: ", "returned NoneType", "mkc.Outputs")),
    ],
)
def test_function_of_a_file(
    command: Command, function: str, error: type[MkcError], fragments: tuple[str, ...]
) -> None:
    command.refused(error, *fragments, argv=f"compile mine.py:{function}")


@pytest.mark.usefixtures("model_file")
def test_dtype_that_does_not_exist(command: Command) -> None:
    command.refused(
        ModelFileError, "mine.py:22 raised ValueError", "'f16'", argv="compile mine.py:wrong_dtype"
    )


def test_file_without_a_function(command: Command, model_file: Path) -> None:
    command.refused(
        ModelFileError, "does not name a function", "mine.py:FUNCTION", argv="compile mine.py"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def decoder(step:\n", "broken.py:1 is not valid Python"),
        ("\0", "broken.py is not valid Python"),
        ("import no_such_module\n", "broken.py:1 raised ModuleNotFoundError"),
        ("import sys\nsys.exit(3)\n", "broken.py:2 raised SystemExit: 3"),
    ],
)
def test_file_that_cannot_be_imported(command: Command, text: str, problem: str) -> None:
    (command.folder / "broken.py").write_text(text, encoding="utf-8")
    command.refused(ModelFileError, problem, argv="compile broken.py:decoder")


# Which config.


def with_config(command: Command, **changes: object) -> str:
    """Writes the shipped config with changes; None removes a key."""
    config = json.loads(SHIPPED.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    for key, value in changes.items():
        if value is None:
            del text[key]
        else:
            text[key] = value
    (command.folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return "compile qwen38 --config config.json"


def test_missing_key(command: Command) -> None:
    argv = with_config(command, hidden_size=None)
    command.refused(ConfigKeyError, "'hidden_size' is missing", "a positive integer", argv=argv)


def test_wrong_value(command: Command) -> None:
    argv = with_config(command, vocab_size="many")
    command.refused(ConfigValueError, "'vocab_size' is 'many'", "a positive integer", argv=argv)


def test_the_file_of_a_wrong_value_is_named(command: Command) -> None:
    with_config(command, vocab_size="many")
    (command.folder / "checkpoint").mkdir()
    (command.folder / "config.json").rename(command.folder / "checkpoint" / "config.json")
    message = command.refused(ConfigValueError, argv="compile qwen38 --config checkpoint --no-aot")
    assert message.startswith("error[E102]: checkpoint/config.json: key 'vocab_size' is 'many'; ")


def test_unsupported_feature(command: Command) -> None:
    argv = with_config(command, attention_bias=True)
    command.refused(UnsupportedFeatureError, "'attention_bias'", "biases in attention", argv=argv)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("1" * 5000, "is not JSON"),
        ("[]", "not an object"),
        (None, "cannot be read (No such file"),
    ],
)
def test_config_file(command: Command, text: str | None, problem: str) -> None:
    if text is not None:
        (command.folder / "config.json").write_text(text, encoding="utf-8")
    argv = "compile qwen38 --config config.json"
    command.refused(ConfigFileError, "config.json", problem, "checkpoint folder", argv=argv)


# For what.


def test_unknown_target(command: Command) -> None:
    argv = "compile qwen38 --target tpu9"
    command.refused(UnknownTargetError, "'tpu9'", ", ".join(known_targets()), argv=argv)


def test_unknown_topology(command: Command) -> None:
    argv = "compile qwen38 --target tpu7x:3x3x3"
    command.refused(UnknownTargetError, "'tpu7x:3x3x3'", "2x2x1, 2x2x2", argv=argv)


@pytest.mark.parametrize("batch", [0, 9])
def test_batch(command: Command, batch: int) -> None:
    command.refused(BatchError, f"batch {batch}", "1 to 8", argv=f"compile qwen38 --batch {batch}")


@pytest.mark.parametrize("context", [-1, 0, 1000])
def test_context(command: Command, context: int) -> None:
    argv = f"compile qwen38 --context {context} --no-aot"
    command.refused(ContextError, f"context {context}", "expected", argv=argv)


def test_tp_that_does_not_divide(command: Command) -> None:
    argv = "compile qwen38 --tp 3 --no-aot"
    message = command.refused(
        ShardingError, "tp 3", "in_proj_qkv.weight", "16 units of 128", argv=argv
    )
    assert "tp values that work on this topology: 1, 2, 4, 8." in message


def test_tp_above_the_devices(command: Command) -> None:
    argv = "compile qwen38 --tp 16 --no-aot"
    command.refused(DeviceCountError, "tp 16", "8 devices", "tpu7x:2x2x2", argv=argv)


def test_weights_that_do_not_fit(command: Command) -> None:
    argv = "compile qwen38 --target v5e:1x1 --no-aot"
    command.refused(HbmError, "GiB too much", "Use --target v5e:2x2", argv=argv)


def test_vmem_that_does_not_fit(command: Command) -> None:
    argv = f"compile {EXAMPLE}:decoder --passes residency{{reserve_bytes=63MiB}} --no-aot"
    command.refused(VmemError, "MiB too much", "Cheapest change", "tape_ring", argv=argv)


def test_pipeline(command: Command) -> None:
    argv = "compile qwen38 --passes tiles{} --no-aot"
    command.refused(PassSpecError, "'tiles{}'", "no pass 'tiles'", "shard, tile", argv=argv)


# Where to.


def test_output_that_is_a_file(command: Command) -> None:
    (command.folder / "out").write_text("precious", encoding="utf-8")
    command.refused(OutputError, "out", "is a file", "--out", argv="compile qwen38 --out out")
    assert (command.folder / "out").read_text(encoding="utf-8") == "precious"


def test_output_folder_with_other_files(command: Command) -> None:
    (command.folder / "out").mkdir()
    (command.folder / "out" / "thesis.tex").write_text("precious", encoding="utf-8")
    command.refused(OutputError, "thesis.tex", "--out", argv="compile qwen38 --out out")


def test_output_below_a_file(command: Command) -> None:
    (command.folder / "file").write_text("precious", encoding="utf-8")
    argv = f"compile {EXAMPLE}:decoder --no-aot --out file/out"
    command.refused(OutputError, "file/out", "cannot be", "--out", argv=argv)


def test_nothing_is_written_when_the_tpu_compiler_refuses(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, *, topology: str) -> AotResult:
        return AotResult(ok=False, error="INTERNAL: Mosaic failed", jax="0", libtpu="0")

    monkeypatch.setattr(mkc.driver, "compile_ahead", refuse)
    argv = f"compile {EXAMPLE}:decoder --out out"
    command.refused(AheadOfTimeError, "Mosaic failed", "--no-aot", argv=argv)
