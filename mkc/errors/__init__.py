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
    E34x  plan folders and pictures
    E35x  several processes
    E36x  tasks of an evaluation
    E37x  verification: plans and kernel files
    E38x  serving
"""

from __future__ import annotations

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.checkpoint import CheckpointError
from mkc.errors.checkpoint import CheckpointMismatchError
from mkc.errors.checkpoint import DiskFullError
from mkc.errors.checkpoint import PackedDamagedError
from mkc.errors.checkpoint import PackedFolderError
from mkc.errors.checkpoint import PackedMismatchError
from mkc.errors.checkpoint import SafetensorsError
from mkc.errors.checkpoint import ScaleByteError
from mkc.errors.checkpoint import TensorDifference
from mkc.errors.distributed import CoordinatorError
from mkc.errors.distributed import LauncherError
from mkc.errors.distributed import ProcessesDifferError
from mkc.errors.distributed import ProcessLostError
from mkc.errors.distributed import ProcessOptionError
from mkc.errors.evaluation import BadLine
from mkc.errors.evaluation import ServerAnswerError
from mkc.errors.evaluation import TaskFileError
from mkc.errors.generation import BackendError
from mkc.errors.generation import BackendOptionError
from mkc.errors.generation import GenerationOptionError
from mkc.errors.generation import NotFiniteLogitsError
from mkc.errors.generation import NoTokenAllowedError
from mkc.errors.generation import PromptLengthError
from mkc.errors.generation import PromptTokenError
from mkc.errors.graph import GraphError
from mkc.errors.graph import ParamNameError
from mkc.errors.graph import PassSpecError
from mkc.errors.graph import RegistrationError
from mkc.errors.graph import ShapeError
from mkc.errors.graph import TextError
from mkc.errors.graph import TraceError
from mkc.errors.graph import UnsupportedGraphError
from mkc.errors.graph import UnsupportedOpError
from mkc.errors.memory import HbmError
from mkc.errors.memory import HbmPart
from mkc.errors.memory import HbmPlanError
from mkc.errors.memory import LiveBuffer
from mkc.errors.memory import VmemError
from mkc.errors.plan import EmitError
from mkc.errors.plan import MissingPackageError
from mkc.errors.plan import PicturesError
from mkc.errors.plan import PlanDamagedError
from mkc.errors.plan import PlanFolderError
from mkc.errors.plan import PlanVersionError
from mkc.errors.plan import UnknownDecisionError
from mkc.errors.request import AheadOfTimeError
from mkc.errors.request import BatchError
from mkc.errors.request import ConfigError
from mkc.errors.request import ConfigFileError
from mkc.errors.request import ConfigKeyError
from mkc.errors.request import ConfigValueError
from mkc.errors.request import ContextError
from mkc.errors.request import DeviceCountError
from mkc.errors.request import ModelFileError
from mkc.errors.request import OutputError
from mkc.errors.request import RoundsError
from mkc.errors.request import ShardingError
from mkc.errors.request import TileError
from mkc.errors.request import UnknownModelError
from mkc.errors.request import UnknownTargetError
from mkc.errors.request import UnsupportedFeatureError
from mkc.errors.serving import ApiKeyError
from mkc.errors.serving import BootCheckError
from mkc.errors.serving import EngineError
from mkc.errors.serving import NotServingError
from mkc.errors.serving import QueueFullError
from mkc.errors.serving import RequestBodyError
from mkc.errors.serving import RequestFieldError
from mkc.errors.serving import RequestTimeoutError
from mkc.errors.serving import ServedModelError
from mkc.errors.serving import ServerOptionError
from mkc.errors.speculation import DraftMismatchError
from mkc.errors.speculation import NoDraftsError
from mkc.errors.speculation import SchemeOptionError
from mkc.errors.text import ChatMessageError
from mkc.errors.text import ChatOptionError
from mkc.errors.text import ChatTemplateError
from mkc.errors.text import StopStringError
from mkc.errors.text import TextFormatError
from mkc.errors.text import TokenizerFileError
from mkc.errors.text import TokenizerVocabularyError
from mkc.errors.text import UnsupportedTokenizerError
from mkc.errors.verify import KernelFileError
from mkc.errors.verify import LintError
from mkc.errors.verify import ProofError

__all__ = [
    "AheadOfTimeError",
    "ApiKeyError",
    "BackendError",
    "BackendOptionError",
    "BadLine",
    "BatchError",
    "BootCheckError",
    "ChatMessageError",
    "ChatOptionError",
    "ChatTemplateError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ConfigError",
    "ConfigFileError",
    "ConfigKeyError",
    "ConfigValueError",
    "ContextError",
    "CoordinatorError",
    "DeviceCountError",
    "DiskFullError",
    "DraftMismatchError",
    "EmitError",
    "EngineError",
    "GenerationOptionError",
    "GraphError",
    "HbmError",
    "HbmPart",
    "HbmPlanError",
    "KernelFileError",
    "LauncherError",
    "LintError",
    "LiveBuffer",
    "MissingPackageError",
    "MkcError",
    "ModelFileError",
    "NoDraftsError",
    "NoTokenAllowedError",
    "NotFiniteLogitsError",
    "NotServingError",
    "OutputError",
    "PackedDamagedError",
    "PackedFolderError",
    "PackedMismatchError",
    "ParamNameError",
    "PassSpecError",
    "PicturesError",
    "Place",
    "PlanDamagedError",
    "PlanFolderError",
    "PlanVersionError",
    "ProcessLostError",
    "ProcessOptionError",
    "ProcessesDifferError",
    "PromptLengthError",
    "PromptTokenError",
    "ProofError",
    "QueueFullError",
    "RegistrationError",
    "RequestBodyError",
    "RequestFieldError",
    "RequestTimeoutError",
    "RoundsError",
    "SafetensorsError",
    "ScaleByteError",
    "SchemeOptionError",
    "ServedModelError",
    "ServerAnswerError",
    "ServerOptionError",
    "ShapeError",
    "ShardingError",
    "StopStringError",
    "TaskFileError",
    "TensorDifference",
    "TextError",
    "TextFormatError",
    "TileError",
    "TokenizerFileError",
    "TokenizerVocabularyError",
    "TraceError",
    "UnknownDecisionError",
    "UnknownModelError",
    "UnknownTargetError",
    "UnsupportedFeatureError",
    "UnsupportedGraphError",
    "UnsupportedOpError",
    "UnsupportedTokenizerError",
    "VmemError",
]
