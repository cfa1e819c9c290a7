"""From what the user names as a model to its graph.

A model is a name that some file of `models/` registers with its `MODEL`, or `path/to/file.py:name`
where the name is a function of an `mkc.Step`, a function of a config and a step, or an `mkc.Model`.
"""

from __future__ import annotations

import json
import os.path
import sys
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec
from importlib.util import spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from traceback import extract_tb
from types import ModuleType
from typing import Any

from mkc.errors import ConfigError
from mkc.errors import ConfigFileError
from mkc.errors import MkcError
from mkc.errors import ModelFileError
from mkc.errors import UnknownModelError
from mkc.ir.builder import trace
from mkc.ir.graph import Graph
from mkc.model import Model

PACKAGE = "models"
REGISTERED = "MODEL"
CONFIG_NAME = "config.json"
OWN_FOLDER = Path(__file__).parents[1]
USER_MODULE = "mkc_user_model"  # name of the module made from the user's file


def registered_models() -> dict[str, Model]:
    """The models of the `models` package, by name."""
    found: dict[str, Model] = {}
    for module in iter_modules(import_module(PACKAGE).__path__):
        model = getattr(import_module(f"{PACKAGE}.{module.name}"), REGISTERED, None)
        if isinstance(model, Model):
            assert model.name not in found, f"two modules register the model {model.name!r}"
            found[model.name] = model
    return found


def model_graph(name: str, *, batch: int, context: int, config_path: Path | None) -> Graph:
    """Traces the model that the user named.

    Args:
      name: a registered name or `path/to/file.py:name`.
      config_path: a config.json or a folder with one; None takes the model's default.

    Raises:
      MkcError: there is no such model, or it does not trace.
    """
    if ":" in name or name.endswith(".py"):
        return _graph_of_file(name, batch=batch, context=context, config_path=config_path)
    models = registered_models()
    if name not in models:
        raise UnknownModelError(name=name, known=models)
    file = config_file(config_path or package_folder() / models[name].default_config)
    config = read_config(file)
    with naming(file):
        return models[name].trace(config, batch=batch, context=context)


def package_folder() -> Path:
    """Where the models that mkc ships are."""
    return Path(import_module(PACKAGE).__path__[0])


def config_file(path: Path) -> Path:
    """The config.json itself when the user named a checkpoint folder."""
    try:
        return path / CONFIG_NAME if path.is_dir() else path
    except OSError as error:
        raise ConfigFileError(path=path, problem=f"cannot be read ({_reason(error)})") from error


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Errors in a config say which file it came from."""
    try:
        yield
    except ConfigError as error:
        raise error.in_file(file) from None


def read_config(file: Path) -> Mapping[str, Any]:
    """The contents of a Hugging Face config.json. Raises `ConfigFileError`."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(path=file, problem=f"cannot be read ({_reason(error)})") from error
    except ValueError as error:  # also a number of thousands of digits
        raise ConfigFileError(path=file, problem=f"is not JSON ({error})") from error
    except RecursionError:
        raise ConfigFileError(path=file, problem="is nested too deeply") from None
    if not isinstance(config, dict):
        raise ConfigFileError(path=file, problem="is JSON, but not an object")
    return config


def _graph_of_file(name: str, *, batch: int, context: int, config_path: Path | None) -> Graph:
    file_name, _, attribute = name.rpartition(":")
    if not file_name or not attribute:
        raise ModelFileError(
            model=name, problem="does not name a function", hint=f"Write {name}:FUNCTION"
        )
    path = Path(file_name)
    with _own_imports(path):
        return _trace_file(
            name, path, attribute, batch=batch, context=context, config_path=config_path
        )


def _trace_file(
    name: str, path: Path, attribute: str, *, batch: int, context: int, config_path: Path | None
) -> Graph:
    module = _load(name, path)
    if not hasattr(module, attribute):
        raise ModelFileError(
            model=name,
            problem=f"{path} has no '{attribute}'",
            hint=f"It has: {', '.join(_functions(module)) or 'no functions'}",
        )
    found = getattr(module, attribute)
    if isinstance(found, Model):
        file = config_file(config_path or path.parent / found.default_config)
        config = read_config(file)
        with naming(file), _faults_of_the_user(name, path):
            return found.trace(config, batch=batch, context=context)
    if not callable(found):
        raise ModelFileError(
            model=name, problem=f"'{attribute}' is a {type(found).__name__}, not a function"
        )
    file = config_file(config_path) if config_path else path
    arguments = read_config(file) if config_path else None
    with naming(file), _faults_of_the_user(name, path):
        return trace(found, name=path.stem, batch=batch, context=context, config=arguments)


@contextmanager
def _faults_of_the_user(name: str, path: Path) -> Iterator[None]:
    """What the user's code raises, leaving with `sys.exit` included, becomes one message."""
    try:
        yield
    except (MkcError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _fault_of_mkc(error):
            raise
        raise ModelFileError(model=name, problem=_problem(error, path)) from error


@contextmanager
def _own_imports(path: Path) -> Iterator[None]:
    """The file may import its neighbours, as when Python runs it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _load(name: str, path: Path) -> ModuleType:
    if not os.path.isfile(path):  # also False for a name that no file can have
        raise ModelFileError(model=name, problem=f"there is no file {path}")
    shipped = package_folder().resolve()
    if path.resolve().is_relative_to(shipped):
        below = path.resolve().relative_to(shipped).with_suffix("")
        with _faults_of_the_user(name, path):
            return import_module(".".join((PACKAGE, *below.parts)))
    spec = spec_from_file_location(USER_MODULE, path.resolve())
    if spec is None or spec.loader is None:
        raise ModelFileError(model=name, problem=f"{path} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[USER_MODULE] = module  # dataclasses of the file look their module up
    with _faults_of_the_user(name, path):
        spec.loader.exec_module(module)
    return module


def _functions(module: ModuleType) -> list[str]:
    """Public functions and models that the file itself defines."""
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (isinstance(value, Model) or getattr(value, "__module__", "") == module.__name__)
    )


def _fault_of_mkc(error: BaseException) -> bool:
    """True for a broken promise inside mkc; anything else comes from what the user's file does."""
    frames = extract_tb(error.__traceback__)
    in_mkc = bool(frames) and Path(frames[-1].filename).is_relative_to(OWN_FOLDER)
    return in_mkc and isinstance(error, AssertionError)


def _problem(error: BaseException, path: Path) -> str:
    """`file:line raised TypeError: text`, with the innermost line of the user's file."""
    if isinstance(error, SyntaxError):
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        return f"{place} is not valid Python ({error.msg})"
    frames = extract_tb(error.__traceback__)
    lines = [one.lineno for one in frames if Path(one.filename) == path.resolve()]
    place = f"{path}:{lines[-1]}" if lines else str(path)
    return f"{place} raised {type(error).__name__}: {error}"


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not UTF-8 text"
