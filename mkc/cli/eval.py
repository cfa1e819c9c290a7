"""`mkc eval`: how many tasks of a file a model solves, on this machine or behind a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import BackendOption
from mkc.cli.generation import ContextOption
from mkc.cli.generation import MaxTokensOption
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import ModelOption
from mkc.cli.generation import PackedOption
from mkc.cli.generation import QuietOption
from mkc.cli.generation import RevisionOption
from mkc.cli.generation import Session
from mkc.cli.generation import TargetOption
from mkc.cli.generation import TemperatureOption
from mkc.cli.generation import ThinkOption
from mkc.cli.generation import TpOption
from mkc.cli.generation import open_session
from mkc.cli.generation import sampling_of
from mkc.cli.output import json_text
from mkc.cli.run import chat_request
from mkc.cli.speculation import NONE
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.errors import MkcError
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.served import RequestRefusedError
from mkc.runtime.served import ServedModel
from mkc.runtime.tasks import Task
from mkc.runtime.tasks import interval
from mkc.runtime.tasks import read_tasks
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import Event
from mkc.runtime.text import StopConditions
from mkc.runtime.text import joined

MISSED = 1  # exit status when the accuracy is below --at-least
SEED = 0
ACCEPTANCE = (
    "{scheme}: {tokens_per_round_with_drafts:.2f} tokens per round with drafts, "
    "{tokens_per_round:.2f} per round; {accepted} of {drafted} drafts accepted"
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A task and why it was not solved; None when it was.

    Attributes:
      statistics: of a sequence that ran here.
    """

    task: Task
    problem: str | None
    statistics: SequenceStatistics | None = None


def eval_command(
    arguments: Annotated[
        list[str],
        typer.Argument(
            help="Checkpoint folder or hub name (not with --url), and a file of tasks.",
            metavar="[MODEL] FILE.jsonl",
        ),
    ],
    model: ModelOption = None,
    revision: RevisionOption = None,
    packed: PackedOption = None,
    spec: SpecOption = NONE,
    draft: DraftOption = None,
    backend: BackendOption = BackendChoice.REFERENCE,
    target: TargetOption = "tpu7x",
    tp: TpOption = None,
    context: ContextOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    think: ThinkOption = None,
    slots: Annotated[int, typer.Option(min=1, help="Tasks at once.")] = 4,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Ask a server: http://HOST:PORT/v1, OpenAI API.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Its name there; default the first one of the server.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="MKC_API_KEY", help="Sent to the server.")
    ] = None,
    at_least: Annotated[
        float | None, typer.Option(min=0, max=1, help="Exit status 1 below this accuracy.")
    ] = None,
    show_failures: Annotated[
        bool, typer.Option("--show-failures", help="List the tasks that were not solved.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how many tasks of a file a model solves.

    Tokens are chosen greedily unless --temperature says otherwise. With --spec it also says how
    many drafts were accepted.
    """
    weights, file = _named(arguments, served=url is not None)
    tasks = read_tasks(file, limit=limit)
    sampling = sampling_of(
        SamplingParams(), temperature=temperature, top_k=None, top_p=None, min_p=None, seed=SEED
    )
    session: Session | None = None
    if url is not None:
        options: dict[str, Any] = {"temperature": sampling.temperature, "seed": SEED}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if think is not None:
            options["chat_template_kwargs"] = {"enable_thinking": think}
        server = ServedModel(url=url, name=served_model, api_key=api_key, options=options)
        subject = f"{server.named()} at {url}"
        found = served_outcomes(server, tasks, at_once=slots)
    else:
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
        session = open_session(choice, quiet=quiet, slots=slots)
        subject = session.description
        found = local_outcomes(session, tasks, sampling, max_tokens=max_tokens, thinking=think)
    outcomes = _with_progress(found, total=len(tasks), hidden=quiet or json)
    drafts = None if session is None else speculation(session, outcomes)
    _print(outcomes, drafts, subject=subject, show_failures=show_failures, as_json=json)
    if at_least is not None and _solved(outcomes) < at_least * len(outcomes):
        raise typer.Exit(MISSED)


def _named(arguments: Sequence[str], *, served: bool) -> tuple[str | None, Path]:
    """The checkpoint and the file of tasks that the user named."""
    if len(arguments) > (1 if served else 2):
        expected = "one FILE.jsonl with --url" if served else "[MODEL] FILE.jsonl"
        raise typer.BadParameter(f"{len(arguments)} arguments; expected {expected}")
    return (arguments[0] if len(arguments) == 2 else None), Path(arguments[-1])


def local_outcomes(
    session: Session,
    tasks: Sequence[Task],
    sampling: SamplingParams,
    *,
    max_tokens: int | None,
    thinking: bool | None,
) -> Iterator[Outcome]:
    """Outcomes as they come; as many tasks run at once as the backend has slots.

    Args:
      session: a new one, whose sequences are numbered from 0.
    """
    asked: list[Task] = []
    requests: list[Request] = []
    for task in tasks:
        messages = ChatRequest(messages=task.messages, tools=task.tools, thinking=thinking)
        try:
            request = chat_request(session, messages, sampling, StopConditions(), max_tokens)
            session.generator.check(request)
        except MkcError as error:
            yield Outcome(task=task, problem=error.report())
            continue
        asked.append(task)
        requests.append(request)
    events: dict[int, list[Event]] = {}
    for delta in session.generator.run(requests):
        events.setdefault(delta.sequence, []).extend(delta.events)
        if delta.finish is None:
            continue
        task, failed = asked[delta.sequence], delta.finish.error
        if failed is None:
            problem = task.problem(joined(events.pop(delta.sequence)))
            yield Outcome(task=task, problem=problem, statistics=delta.finish.statistics)
        else:
            yield Outcome(task=task, problem=failed.report())


def served_outcomes(
    server: ServedModel, tasks: Sequence[Task], *, at_once: int
) -> Iterator[Outcome]:
    """Outcomes in the order of the tasks.

    Raises:
      ServerAnswerError: the server does not answer as it should.
    """
    name = server.named()

    def ask(task: Task) -> Outcome:
        try:
            return Outcome(task=task, problem=task.problem(server.reply(task, name)))
        except RequestRefusedError as error:
            return Outcome(task=task, problem=f"refused with {error}")

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            yield from pool.map(ask, tasks)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def speculation(session: Session, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """How many tokens a round emitted; None without drafts. docs/bench.md lists the keys."""
    ended = [one.statistics for one in outcomes if one.statistics is not None]
    if session.scheme == NONE or not ended:
        return None
    rounds = sum(one.rounds for one in ended)
    tokens = sum(one.output_tokens - 1 for one in ended)  # the first one comes from the prompt
    verifying = sum(session.generator.draft_rounds)
    # A round without drafts emits one token.
    verified = tokens - (rounds - verifying)
    return {
        "scheme": session.scheme,
        "rounds": rounds,
        "tokens_per_round": round(tokens / max(rounds, 1), 4),
        "rounds_with_drafts": verifying,
        "tokens_per_round_with_drafts": round(verified / max(verifying, 1), 4),
        "drafted": sum(one.drafted for one in ended),
        "accepted": sum(one.accepted for one in ended),
    }


def _with_progress(found: Iterator[Outcome], *, total: int, hidden: bool) -> list[Outcome]:
    """All outcomes, with a bar on stderr while they come."""
    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=hidden or not console.is_terminal
    ) as bar:
        return list(bar.track(found, total=total, description="tasks"))


def _solved(outcomes: Sequence[Outcome]) -> int:
    return sum(one.problem is None for one in outcomes)


def _print(
    outcomes: Sequence[Outcome],
    drafts: Mapping[str, Any] | None,
    *,
    subject: str,
    show_failures: bool,
    as_json: bool,
) -> None:
    failures = [one for one in outcomes if one.problem is not None] if show_failures else []
    if as_json:
        document = {
            "model": subject,
            **_counts(outcomes),
            "tasks": {
                kind: _counts([one for one in outcomes if one.task.kind == kind])
                for kind in _kinds(outcomes)
            },
        }
        if drafts is not None:
            document["speculation"] = drafts
        if show_failures:
            document["failures"] = [
                {
                    "id": one.task.id,
                    "task": one.task.kind,
                    "answer": one.task.answer,
                    "problem": one.problem,
                }
                for one in failures
            ]
        typer.echo(json_text(document), nl=False)
        return
    for one in failures:
        wanted = f"{one.task.check} {dumps(one.task.answer)}"
        typer.echo(f"{one.task.id} ({one.task.kind}): {one.problem}; expected {wanted}")
    Console().print(_table(outcomes, subject))
    if drafts is not None:
        typer.echo(ACCEPTANCE.format(**drafts))


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return sorted(Counter(one.task.kind for one in outcomes))


def _counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    solved, total = _solved(outcomes), len(outcomes)
    return {
        "solved": solved,
        "total": total,
        "accuracy": round(solved / total, 4),
        "interval_95": [round(one, 4) for one in interval(solved, total)],
    }


def _table(outcomes: Sequence[Outcome], subject: str) -> Table:
    table = Table(title=subject, title_justify="left")
    table.add_column("task")
    for heading in ("solved", "of", "accuracy %", "95 % interval"):
        table.add_column(heading, justify="right")
    parts = [
        (kind, [one for one in outcomes if one.task.kind == kind]) for kind in _kinds(outcomes)
    ]
    for label, part in [*parts, ("all", list(outcomes))]:
        counts = _counts(part)
        low, high = counts["interval_95"]
        table.add_row(
            label,
            str(counts["solved"]),
            str(counts["total"]),
            f"{100 * counts['accuracy']:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
        )
    return table
