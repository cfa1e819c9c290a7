"""`mkc serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import BackendOption
from mkc.cli.generation import ContextOption
from mkc.cli.generation import CoordinatorOption
from mkc.cli.generation import DistributedOption
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import ModelOption
from mkc.cli.generation import PackedOption
from mkc.cli.generation import ProcessesOption
from mkc.cli.generation import ProcessOption
from mkc.cli.generation import RevisionOption
from mkc.cli.generation import Session
from mkc.cli.generation import StartTimeoutOption
from mkc.cli.generation import TargetOption
from mkc.cli.generation import TpOption
from mkc.cli.generation import kernel_choice
from mkc.cli.generation import launch_of
from mkc.cli.generation import open_session
from mkc.cli.jax_settings import cache_folder
from mkc.cli.served_pictures import pictures_of
from mkc.cli.shipped import DEFAULT_CHECKPOINT
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.errors import ServerOptionError
from mkc.runtime.distributed import START_SECONDS
from mkc.runtime.prefix_cache import PrefixCache
from serve.boot import boot_check as check
from serve.boot import warm_up
from serve.keys import read_keys
from serve.model import ServedModel
from serve.process import LOOPBACK
from serve.process import Place
from serve.process import run
from serve.settings import Settings

KEYS_VARIABLE = "MKC_API_KEYS"
SLOTS = 8
MIB, GIB = 1 << 20, 1 << 30


def serve_command(
    weights: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint folder, or OWNER/NAME[@REVISION] of the Hugging Face hub.",
            metavar="[MODEL]",
        ),
    ] = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
    packed: PackedOption = None,
    spec: SpecOption = None,
    draft: DraftOption = None,
    backend: BackendOption = BackendChoice.REFERENCE,
    target: TargetOption = "tpu7x",
    tp: TpOption = None,
    context: ContextOption = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Sequences at once: rows of the kernel.")
    ] = SLOTS,
    rounds_per_launch: Annotated[
        int,
        typer.Option(min=1, help="Most rounds of a launch; requests join and leave between two."),
    ] = 1,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Names for requests; repeatable, the first one is in answers."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    uds: Annotated[Path | None, typer.Option(help="Unix socket instead of a port.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="KEY or LABEL=KEY; repeatable. Other users of this machine can see it."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A key on each line, or LABEL=sha256:DIGEST.")
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="/metrics and /load need no key.")
    ] = False,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin of pages that may ask; repeatable.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Accepted Host header; repeatable.")
    ] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Private key for TLS.")] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate for TLS.")] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Authorities of the certificates that clients must show.")
    ] = None,
    queue_size: Annotated[int, typer.Option(min=0, help="Sequences that may wait.")] = 256,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request.")] = 8 << 20,
    request_timeout: Annotated[float, typer.Option(help="Seconds for one request.")] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for running requests after SIGTERM.")
    ] = 300.0,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Ignore unknown fields, and say so in a header.")
    ] = False,
    force_include_usage: Annotated[
        bool, typer.Option("--force-include-usage", help="Streams always end with the usage.")
    ] = False,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line per request, without what was said.")
    ] = False,
    request_id_headers: Annotated[
        bool, typer.Option("--request-id-headers", help="Take over and answer X-Request-Id.")
    ] = False,
    boot_check: Annotated[
        bool,
        typer.Option("--boot-check", help="Decode with and without drafts first, and compare."),
    ] = False,
    distributed: DistributedOption = False,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process: ProcessOption = None,
    start_timeout: StartTimeoutOption = START_SECONDS,
) -> None:
    """Serve a model to OpenAI clients. Listens on this machine only, unless told otherwise."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="mkc: %(asctime)s %(message)s", force=True
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    choice = ModelChoice(
        model=model,
        weights=weights,
        revision=revision,
        packed=packed,
        backend=backend,
        target=target,
        tp=tp,
        context=context,
        spec=spec,
        draft=draft,
        launch=launch_of(
            distributed,
            coordinator=coordinator,
            processes=processes,
            process=process,
            timeout=start_timeout,
        ),
    )
    place = Place(
        host=host,
        port=port,
        uds=uds,
        key_file=ssl_keyfile,
        certificate=ssl_certfile,
        authorities=ssl_ca_certs,
        drain_seconds=drain_timeout,
    )
    check_tls(place)
    keys = read_keys(api_key or (), file=api_key_file, environment=os.environ.get(KEYS_VARIABLE))
    hosts = tuple(allowed_host or ())
    if place.is_local and uds is None and not keys:
        hosts = (*LOOPBACK, *hosts)  # so that no page can reach it under a name of its own
    settings = Settings(
        keys=keys,
        open_metrics=open_metrics,
        max_body_bytes=max_body_bytes,
        request_seconds=request_timeout,
        lenient=lenient,
        force_usage=force_include_usage,
        log_requests=log_requests,
        request_ids=request_id_headers,
        origins=tuple(allowed_origin or ()),
        hosts=hosts,
    )
    status = run(
        opener(choice, rows, names_of(served_model_name, weights), boot_check=boot_check),
        settings,
        place,
        queue_size=queue_size,
        rounds=rounds_per_launch,
        banner=banner,
    )
    raise typer.Exit(status)


def names_of(given: list[str] | None, weights: str | None) -> list[str]:
    """The names of what is served: those given, or that of the checkpoint."""
    if given:
        return given
    if weights is None:
        return [DEFAULT_CHECKPOINT]
    return [Path(weights).resolve().name if Path(weights).exists() else weights]


def check_tls(place: Place) -> None:
    """Raises `ServerOptionError` when a part of TLS is missing."""
    if (place.key_file is None) != (place.certificate is None):
        raise ServerOptionError(
            problem="only one of --ssl-keyfile and --ssl-certfile",
            expected="both, or neither",
            hint="Name the other file too",
        )
    if place.authorities is not None and place.certificate is None:
        raise ServerOptionError(
            problem="--ssl-ca-certs without a certificate of the server",
            expected="--ssl-certfile and --ssl-keyfile too",
            hint="Name these files",
        )
    for path in (place.key_file, place.certificate, place.authorities):
        if path is not None and not path.is_file():
            raise ServerOptionError(
                problem=f"{path} is no file", expected="a PEM file", hint="Correct the path"
            )


def opener(
    choice: ModelChoice, rows: int, names: list[str], *, boot_check: bool
) -> Callable[[Callable[[str], None]], ServedModel]:
    """What opens the model, also for a second time after a crash.

    Several processes cannot join a second time: the model of the first time is then used again.
    """

    def load() -> ServedModel:
        return served(open_session(choice, quiet=False, slots=rows), choice, names)

    first = load() if choice.launch is not None else None

    def open_model(say: Callable[[str], None]) -> ServedModel:
        say("loading weights")
        model = with_new_cache(first) if first is not None else load()
        say("compiling")
        warm_up(model)
        if boot_check:
            say("boot check")
            say(check(model, backend=choice.backend.value, scheme=choice.spec))
        return model

    return open_model


def with_new_cache(model: ServedModel) -> ServedModel:
    """The same model with nothing remembered."""
    cache = model.prefix_cache
    assert cache is not None
    return replace(model, prefix_cache=PrefixCache(rows=cache.rows, max_bytes=cache.max_bytes))


def served(session: Session, choice: ModelChoice, names: list[str]) -> ServedModel:
    """A session as the server needs it."""
    generator = session.generator
    return ServedModel(
        name=names[0],
        aliases=tuple(names[1:]),
        backend=generator.backend,
        tokenizer=session.tokenizer,
        chat=session.chat,
        sampling=session.sampling,
        description=session.description,
        scheme=session.scheme,
        fingerprint=session.fingerprint,
        target=choice.target if choice.backend is not BackendChoice.REFERENCE else "",
        hbm_bytes=session.hbm_bytes,
        vmem_bytes=session.vmem_bytes,
        step_floor_us=session.step_floor_us,
        prefix_cache=generator.prefix_cache,
        pictures=pictures_of(generator.backend, kernel_choice(choice)),
    )


def memory_text(model: ServedModel) -> str:
    """What a kernel takes of each device."""
    if model.hbm_bytes is None or model.vmem_bytes is None:
        return "no kernel, no plan"
    return (
        f"{model.hbm_bytes / GIB:.2f} GiB of HBM and {model.vmem_bytes / MIB:.1f} MiB of VMEM of "
        "each device, planned"
    )


def banner(model: ServedModel, url: str) -> str:
    """What is served, in a few lines."""
    cache = cache_folder()
    used = cache is not None and cache.is_dir() and any(cache.iterdir())
    lines = [
        ("serving", f"{url}/v1"),
        ("model", ", ".join((model.name, *model.aliases))),
        ("backend", model.description),
        ("scheme", model.scheme),
        ("kernel", model.fingerprint),
        ("memory", memory_text(model)),
        ("XLA cache", f"{cache}, {'has programs' if used else 'empty'}" if cache else "off"),
    ]
    return "\n".join(f"  {label:<10} {text}" for label, text in lines)
