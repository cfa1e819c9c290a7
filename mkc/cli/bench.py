"""`mkc bench`: how fast a model generates on this machine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import BackendOption
from mkc.cli.generation import ContextOption
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import ModelOption
from mkc.cli.generation import PackedOption
from mkc.cli.generation import QuietOption
from mkc.cli.generation import RevisionOption
from mkc.cli.generation import Session
from mkc.cli.generation import TargetOption
from mkc.cli.generation import TemperatureOption
from mkc.cli.generation import TopKOption
from mkc.cli.generation import TopPOption
from mkc.cli.generation import TpOption
from mkc.cli.generation import open_session
from mkc.cli.generation import sampling_of
from mkc.cli.output import json_text
from mkc.cli.speculation import NONE
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.runtime.backends import BackendName
from mkc.runtime.measure import Load
from mkc.runtime.measure import Measurement
from mkc.runtime.measure import measure
from mkc.runtime.sampling import SamplingParams

MILLISECONDS = 1e3
MICROSECONDS = 1e6
WARM_UP = "Each row was run once before, not measured: nothing is compiled in the measured times."
RANDOM = "Acceptance is that of random prompts; a drafter is made for text of its target."
CPU = "Times of this machine, not of a TPU: the {backend} backend ran on its CPU."


@dataclass(frozen=True, kw_only=True)
class Row:
    """One load and what it took.

    Attributes:
      scheme: how tokens were drafted, `none` for not at all.
      step_floor_us: predicted least time of a round, None where no prediction applies.
    """

    load: Load
    measured: Measurement
    scheme: str
    step_floor_us: float | None


def bench_command(
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
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at once; repeatable. Default 1.")
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of each prompt; repeatable. Default 32 and 256."),
    ] = None,
    output_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens that each sequence generates.")
    ] = 128,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how fast a model generates.

    Prompts are random tokens, outputs run to their full length. Sampling is greedy unless options
    say otherwise.
    """
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
    )
    sampling = sampling_of(
        SamplingParams(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=None, seed=None
    )
    rows: list[Row] = []
    descriptions: list[str] = []
    for slots in batch or [1]:
        session = open_session(choice, quiet=quiet, slots=slots)
        descriptions.append(session.description)
        for length in prompt_tokens or [32, 256]:
            load = Load(
                batch=slots,
                prompt_tokens=length,
                output_tokens=output_tokens,
                sampling=sampling,
            )
            rows.append(measured_row(session, load))
    name = session.generator.backend.name
    if json:
        typer.echo(json_text(document(rows, name, descriptions)), nl=False)
        return
    Console().print(table(rows, name))
    for note in notes(rows, name):
        typer.echo(note)


def measured_row(session: Session, load: Load) -> Row:
    """Runs one load. Raises `PromptLengthError` when the context does not hold it."""
    measured = measure(session.generator.backend, load, tokenizer=session.tokenizer)
    return Row(
        load=load,
        measured=measured,
        scheme=session.scheme,
        step_floor_us=session.step_floor_us,
    )


def notes(rows: Sequence[Row], backend: BackendName) -> list[str]:
    """What a reader of the figures has to know."""
    found = [WARM_UP]
    if backend == "tpu":
        found.append("Floors are predicted: weight and state bytes at the sustained rate.")
    else:
        found.append(CPU.format(backend=backend))
    if any(row.scheme != NONE for row in rows):
        found.append(RANDOM)
    return found


def document(
    rows: Sequence[Row], backend: BackendName, descriptions: Sequence[str]
) -> dict[str, Any]:
    """What `--json` prints; docs/bench.md lists the keys."""
    return {
        "backend": backend,
        "descriptions": list(descriptions),
        "notes": notes(rows, backend),
        "runs": [_figures(one) for one in rows],
    }


def _figures(row: Row) -> Mapping[str, Any]:
    load, measured = row.load, row.measured
    return {
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "temperature": load.sampling.temperature,
        "first_token_ms": round(MILLISECONDS * measured.first_token, 3),
        "decode_tokens_per_second": round(measured.decode_rate, 2),
        "end_to_end_tokens_per_second": round(measured.whole_rate, 2),
        "launches": measured.launches,
        "rounds": measured.rounds,
        "rounds_per_launch": round(measured.rounds / measured.launches, 3),
        "round_us": round(MICROSECONDS * measured.decode / measured.rounds, 1),
        "predicted_floor_round_us": row.step_floor_us,
        "host_ms_per_launch": round(MILLISECONDS * measured.outside_per_launch, 4),
        "host_share": round(measured.outside / measured.decode, 4),
        "speculation": {
            "scheme": row.scheme,
            "tokens_per_round": round(measured.tokens_per_round, 4),
            "drafted": measured.drafted,
            "accepted": measured.accepted,
        },
    }


def table(rows: Sequence[Row], backend: BackendName) -> Table:
    """A column per load; the predicted floor under the measured round where there is one."""
    found = Table(title=f"{backend} backend, speculation: {rows[0].scheme}", title_justify="left")
    found.add_column("batch x prompt tokens")
    for row in rows:
        found.add_column(f"{row.load.batch} x {row.load.prompt_tokens}", justify="right")
    for label, cell in LINES.items():
        found.add_row(label, *(cell(row) for row in rows))
    if any(row.step_floor_us is not None for row in rows):
        found.add_row("predicted floor of a round, us", *(f"{row.step_floor_us}" for row in rows))
    return found


LINES: Mapping[str, Callable[[Row], str]] = {
    "first token, ms": lambda row: f"{MILLISECONDS * row.measured.first_token:.1f}",
    "decode, tokens/s": lambda row: f"{row.measured.decode_rate:.1f}",
    "end to end, tokens/s": lambda row: f"{row.measured.whole_rate:.1f}",
    "tokens per round": lambda row: f"{row.measured.tokens_per_round:.2f}",
    "drafts accepted": lambda row: f"{row.measured.accepted} of {row.measured.drafted}",
    "launches": lambda row: f"{row.measured.launches}",
    "rounds per launch": lambda row: f"{row.measured.rounds / row.measured.launches:.2f}",
    "host per launch, ms": lambda row: f"{MILLISECONDS * row.measured.outside_per_launch:.3f}",
    "host share, %": lambda row: f"{100 * row.measured.outside / row.measured.decode:.1f}",
    "round, us": lambda row: f"{MICROSECONDS * row.measured.decode / row.measured.rounds:.0f}",
}
