"""What `mkc run` and `mkc chat` share: options, and the way from a checkpoint to a generator."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from signal import SIGINT
from signal import signal
from threading import current_thread
from threading import main_thread
from types import FrameType
from typing import Annotated
from typing import Any

import jax
import typer

from mkc.cli.doubts import doubts
from mkc.cli.jax_settings import choose_threads
from mkc.cli.jax_settings import prepare_jax
from mkc.cli.kernel_choice import KernelChoice
from mkc.cli.lookup import model_graph
from mkc.cli.lookup import registered_models
from mkc.cli.shipped import checkpoint_named
from mkc.cli.speculation import NONE
from mkc.cli.speculation import check_scheme
from mkc.cli.speculation import open_drafting
from mkc.cli.speculation import wanted_drafter
from mkc.errors import BackendOptionError
from mkc.errors import ConfigError
from mkc.errors import ConfigValueError
from mkc.errors import ProcessOptionError
from mkc.errors import UnknownModelError
from mkc.ir.graph import Graph
from mkc.ir.text import print_graph
from mkc.runtime import distributed
from mkc.runtime.backends import Backend
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.backends import open_kernel
from mkc.runtime.backends import open_reference
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.generation_config import default_sampling
from mkc.runtime.manifest import read_manifest
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Delta
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import Chat
from mkc.runtime.text import Tokenizer
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer

DEFAULT_CONTEXT = 4096
CONTEXT_MULTIPLE = 16  # rows of a cache tile in bf16
ROUNDS_PER_LAUNCH = 8  # text appears in steps of so many tokens
PREFIX_CACHE_BYTES = 1 << 30


class BackendChoice(StrEnum):
    """What runs the model."""

    TPU = "tpu"
    INTERPRET = "interpret"
    REFERENCE = "reference"


def _of_a_kernel(context: typer.Context, target: str) -> str:
    """The target; refused where the user gives one for the backend without a kernel."""
    source = context.get_parameter_source("target")
    given = source is not None and source.name == "COMMANDLINE"
    if given and context.params["backend"] is BackendChoice.REFERENCE:
        raise BackendOptionError(backend=BackendChoice.REFERENCE, options=["--target"])
    return target


ModelOption = Annotated[
    str | None,
    typer.Option(help="A name of `mkc models`, or file.py:function; default by the config."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, tiny, kimi-tiny, or OWNER/NAME[@REVISION] of the hub."),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub checkpoint.")
]
PackedOption = Annotated[
    Path | None, typer.Option(help="Folder that mkc pack wrote; default packs on the fly.")
]
BackendOption = Annotated[  # eager: what is checked against it comes later
    BackendChoice, typer.Option(is_eager=True, help="What runs the model.")
]
TargetOption = Annotated[
    str,
    typer.Option(
        callback=_of_a_kernel,
        help="Of the kernel: GENERATION or GENERATION:TOPOLOGY, see `mkc targets`.",
    ),
]
TpOption = Annotated[
    int | None,
    typer.Option(min=1, help="Ranks; default all devices on TPUs, 1 when interpreted."),
]
ContextOption = Annotated[
    int | None, typer.Option(min=1, help=f"Positions; default {DEFAULT_CONTEXT} or the model's.")
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens of an answer; default what there is room for."),
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 for the most probable token; default the checkpoint's.")
]
TopKOption = Annotated[int | None, typer.Option(help="Keep so many tokens, 0 for all.")]
TopPOption = Annotated[float | None, typer.Option(help="Keep tokens with this much mass.")]
MinPOption = Annotated[float | None, typer.Option(help="Keep tokens this near to the best one.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
ThinkOption = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Whether the model thinks first.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Do not say what runs.")]
DistributedOption = Annotated[
    bool,
    typer.Option("--distributed", help="Join the other processes that the launcher started."),
]
CoordinatorOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of process 0, where no launcher says it.")
]
ProcessesOption = Annotated[int | None, typer.Option(help="How many processes there are.")]
ProcessOption = Annotated[int | None, typer.Option(help="Number of this process, from 0.")]
StartTimeoutOption = Annotated[
    int, typer.Option(help="Seconds to wait for the other processes to come up.")
]


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """What the user named; see the options above.

    Attributes:
      launch: how to join other processes, None for a process of its own.
      quiet: do not say what is loaded.
      spec, draft: scheme, and checkpoint of its drafter; without them the drafter that the model
        brings, if it does.
    """

    model: str | None
    weights: str | None
    revision: str | None
    packed: Path | None
    backend: BackendChoice
    target: str
    tp: int | None
    context: int | None
    launch: distributed.Launch | None = None
    quiet: bool = False
    spec: str | None = None
    draft: str | None = None


@dataclass(frozen=True, kw_only=True)
class Session:
    """An opened checkpoint.

    Attributes:
      sampling: what the checkpoint asks for.
      scheme: how tokens are drafted, `none` for not at all.
      step_floor_us: predicted least time of a step, None where no prediction applies.
      fingerprint: of the graph, the backend and the context.
      hbm_bytes, vmem_bytes: planned for each device of a kernel; None without one.
    """

    generator: Generator
    tokenizer: Tokenizer
    chat: Chat
    sampling: SamplingParams
    description: str
    scheme: str = NONE
    step_floor_us: float | None = None
    fingerprint: str = ""
    hbm_bytes: int | None = None
    vmem_bytes: int | None = None

    def stream(self, request: Request) -> Iterator[Delta]:
        """The deltas of one request; the last one has its end. Ctrl-C cancels it.

        Raises:
          MkcError: the request is refused.
        """
        number = self.generator.add(request)
        with interrupts() as interrupted:
            try:
                while number in self.generator.running:
                    if interrupted():
                        yield self.generator.cancel(number)
                        return
                    yield from self.generator.rounds()
            finally:
                if number in self.generator.running:
                    self.generator.cancel(number)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C has been pressed since; a second one is an exception.

    An exception at any moment could get between a launch and the states that it returns.
    """
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if current_thread() is not main_thread():
        yield lambda: False  # only the main thread gets signals
        return
    before = signal(SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal(SIGINT, before)


def open_session(choice: ModelChoice, *, quiet: bool, slots: int = 1) -> Session:
    """Opens a checkpoint, and says on stderr what runs.

    Of several processes only process 0 returns; the others follow it and end when it does.

    Args:
      slots: sequences at once.

    Raises:
      MkcError: something of it is missing or does not fit.
    """
    check_kernel_options(choice)
    prepare_jax(
        devices=(choice.tp or 1) if choice.backend is BackendChoice.INTERPRET else None,
        on_cpu=choice.backend is not BackendChoice.TPU,
    )
    check_scheme(choice.spec, choice.draft, distributed=choice.launch is not None)
    if choice.launch is not None:
        distributed.join(choice.launch)
    checkpoint = Checkpoint.open(checkpoint_named(choice.weights), revision=choice.revision)
    model = choice.model or model_of(checkpoint.config)
    draft = wanted_drafter(
        choice.spec,
        choice.draft,
        folder=checkpoint.folder,
        by_default=drafts_by_default(choice, model),
    )
    context = choice.context or default_context(checkpoint.config)
    graph = model_graph(model, batch=slots, context=context, config_path=checkpoint.folder)
    tokenizer = load_tokenizer(checkpoint.folder)
    chat = load_chat(checkpoint.folder, tokenizer)
    if choice.backend is BackendChoice.REFERENCE:
        choose_threads(graph)
    if choice.launch is not None:
        distributed.agree("model", fingerprint(graph, choice))
    choice = replace(choice, quiet=quiet)
    if draft is not None:
        opened = open_drafting(
            draft,
            model,
            checkpoint,
            slots=slots,
            context=context,
            rounds_per_launch=ROUNDS_PER_LAUNCH,
            kernel=kernel_choice(choice),
        )
    else:
        opened = open_backend(choice, graph, checkpoint)
    backend = opened.backend if choice.launch is None else lead_or_follow(opened.backend)
    for doubt in doubts(tokenizer, opened.not_finite):
        print(f"warning: {doubt}", file=sys.stderr)
    if not quiet:
        print(f"mkc: {opened.description}", file=sys.stderr)
    cache = PrefixCache(rows=backend.prefill_rows, max_bytes=PREFIX_CACHE_BYTES)
    return Session(
        generator=Generator(backend, tokenizer=tokenizer, prefix_cache=cache),
        tokenizer=tokenizer,
        chat=chat,
        sampling=default_sampling(checkpoint.folder),
        description=opened.description,
        scheme=draft.name if draft is not None else NONE,
        step_floor_us=opened.step_floor_us,
        fingerprint=fingerprint(graph, choice),
        hbm_bytes=opened.hbm_bytes,
        vmem_bytes=opened.vmem_bytes,
    )


def open_backend(choice: ModelChoice, graph: Graph, checkpoint: Checkpoint) -> OpenedBackend:
    """The backend that the user named, and no other."""
    kernel = kernel_choice(choice)
    if kernel is None:
        return open_reference(
            graph,
            checkpoint,
            rounds_per_launch=ROUNDS_PER_LAUNCH,
            devices=jax.devices() if choice.launch is not None else None,
        )
    target, tp = kernel.place(graph)
    return open_kernel(
        kernel.name,
        graph,
        checkpoint,
        target=target,
        tp=tp,
        rounds_per_launch=ROUNDS_PER_LAUNCH,
        packed=kernel.packed,
        say=kernel.say,
    )


def kernel_choice(choice: ModelChoice) -> KernelChoice | None:
    """The kernel that the user named; None for the reference backend."""
    if choice.backend is BackendChoice.REFERENCE:
        return None
    return KernelChoice(
        name="interpret" if choice.backend is BackendChoice.INTERPRET else "tpu",
        target=choice.target,
        tp=choice.tp,
        packed=choice.packed,
        say=lambda line: None if choice.quiet else print(f"mkc: {line}", file=sys.stderr),
    )


def check_kernel_options(choice: ModelChoice) -> None:
    """Raises `BackendOptionError` for what would be ignored, since no kernel runs."""
    given = {"--packed": choice.packed, "--tp": choice.tp}
    names = [name for name, value in given.items() if value is not None]
    if names and choice.backend is BackendChoice.REFERENCE:
        raise BackendOptionError(backend=choice.backend, options=names)


def drafts_by_default(choice: ModelChoice, model: str) -> bool:
    """Whether a drafter that the model brings is used unless an option says something.

    Several processes do not draft, nor do packed weights without a drafter.
    """
    if choice.launch is not None or model not in registered_models():
        return False
    return choice.packed is None or bool(read_manifest(choice.packed).get("drafter"))


def launch_of(
    wanted: bool,
    *,
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    timeout: int,
) -> distributed.Launch | None:
    """What the options about processes say; None without `--distributed`.

    Raises:
      ProcessOptionError: they contradict each other.
    """
    launch = distributed.Launch(
        coordinator=coordinator, processes=processes, process=process, timeout=timeout
    )
    if launch.explicit and not wanted:
        raise ProcessOptionError(
            problem="--coordinator, --processes and --process without --distributed",
            expected="them only where several processes run one model",
            hint="Add --distributed, or leave them out",
        )
    return launch if wanted else None


def fingerprint(graph: Graph, choice: ModelChoice) -> str:
    """What has to be the same in all processes, in a few words."""
    digest = blake2b(print_graph(graph).encode(), digest_size=8).hexdigest()
    parts = [f"graph {digest}", f"context {graph.context}", f"backend {choice.backend}"]
    if choice.backend is not BackendChoice.REFERENCE:
        parts += [f"target {choice.target}", f"tp {choice.tp or 'all'}"]
    return ", ".join(parts)


def lead_or_follow(backend: Backend) -> Backend:
    """In process 0 a backend of all processes; the others follow it, and end with it."""
    messages = distributed.Channel()
    if not distributed.is_leader():
        distributed.follow(backend, messages)
        raise typer.Exit
    leading = distributed.LeadingBackend(backend, messages)
    atexit.register(leading.close)  # however this process ends, the others do not wait for it
    return leading


def model_of(config: Mapping[str, Any]) -> str:
    """The first registered model that accepts a config.

    Raises:
      UnknownModelError: there is none.
    """
    models = registered_models()
    for name, model in sorted(models.items()):
        try:
            model.load_config(config)
        except ConfigError:
            continue
        return name
    raise UnknownModelError(name=str(config.get("model_type")), known=models)


def default_context(config: Mapping[str, Any]) -> int:
    """What the model was made for, at most DEFAULT_CONTEXT; whole cache tiles.

    Raises:
      ConfigValueError: the config says no number.
    """
    text = config.get("text_config") or config
    key = "max_position_embeddings"
    limit = text.get(key, DEFAULT_CONTEXT)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigValueError(key=key, got=limit, expected="a positive integer")
    return max(1, min(limit, DEFAULT_CONTEXT) // CONTEXT_MULTIPLE) * CONTEXT_MULTIPLE


def sampling_of(
    default: SamplingParams,
    *,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
) -> SamplingParams:
    """The checkpoint's sampling with what the user gave. Raises `GenerationOptionError`."""
    given = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(default, **changes)


def statistics_line(statistics: SequenceStatistics) -> str:
    """What one answer took, in a line."""
    cached = f" ({statistics.cached_tokens} cached)" if statistics.cached_tokens else ""
    drafts = (
        f"{statistics.accepted} of {statistics.drafted} drafted tokens accepted"
        if statistics.drafted
        else "no draft"
    )
    return (
        f"{statistics.prompt_tokens} prompt tokens{cached}, first token after "
        f"{statistics.prefill_seconds:.2f} s, {statistics.output_tokens} tokens in "
        f"{statistics.rounds} rounds of {statistics.launches} launches ({drafts}), "
        f"{statistics.tokens_per_second:.1f} tokens/s"
    )
