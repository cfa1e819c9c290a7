"""`mkc run`: one prompt, one answer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import BackendOption
from mkc.cli.generation import ContextOption
from mkc.cli.generation import CoordinatorOption
from mkc.cli.generation import DistributedOption
from mkc.cli.generation import MaxTokensOption
from mkc.cli.generation import MinPOption
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import ModelOption
from mkc.cli.generation import PackedOption
from mkc.cli.generation import ProcessesOption
from mkc.cli.generation import ProcessOption
from mkc.cli.generation import QuietOption
from mkc.cli.generation import RevisionOption
from mkc.cli.generation import SeedOption
from mkc.cli.generation import Session
from mkc.cli.generation import StartTimeoutOption
from mkc.cli.generation import TargetOption
from mkc.cli.generation import TemperatureOption
from mkc.cli.generation import ThinkOption
from mkc.cli.generation import TopKOption
from mkc.cli.generation import TopPOption
from mkc.cli.generation import TpOption
from mkc.cli.generation import WeightsOption
from mkc.cli.generation import launch_of
from mkc.cli.generation import open_session
from mkc.cli.generation import sampling_of
from mkc.cli.generation import statistics_line
from mkc.cli.output import json_text
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.runtime.distributed import START_SECONDS
from mkc.runtime.request import Delta
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import StopConditions

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it


def run_command(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to answer or to continue.")],
    model: ModelOption = None,
    weights: WeightsOption = None,
    revision: RevisionOption = None,
    packed: PackedOption = None,
    spec: SpecOption = None,
    draft: DraftOption = None,
    backend: BackendOption = BackendChoice.REFERENCE,
    target: TargetOption = "tpu7x",
    tp: TpOption = None,
    context: ContextOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this string; repeatable.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as text, without a chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    think: ThinkOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print times on stderr.")] = False,
    quiet: QuietOption = False,
    distributed: DistributedOption = False,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process: ProcessOption = None,
    start_timeout: StartTimeoutOption = START_SECONDS,
) -> None:
    """Answer one prompt. Text appears on stdout as it is generated, thoughts are left out."""
    session = open_session(
        ModelChoice(
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
        ),
        quiet=quiet,
    )
    sampling = sampling_of(
        session.sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    stops = StopConditions(strings=tuple(stop or ()))
    if raw:
        request = raw_request(session, prompt, sampling, stops, max_tokens)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        asked = ChatRequest(messages=messages, thinking=think)
        request = chat_request(session, asked, sampling, stops, max_tokens)
    deltas: list[Delta] = []
    for delta in session.stream(request):
        deltas.append(delta)
        if not json:
            print(delta.text, end="", flush=True)
    if not json:
        print(flush=True)
    _finish(deltas, json=json, stats=stats, description=session.description)


def raw_request(
    session: Session,
    prompt: str,
    sampling: SamplingParams,
    stops: StopConditions,
    max_tokens: int | None,
) -> Request:
    """The continuation of a text in which markup is markup."""
    ids = [*session.tokenizer.prefix_ids, *session.tokenizer.encode(prompt, allow_special=True)]
    return Request(
        tokens=ids,
        sampling=sampling,
        max_tokens=max_tokens,
        output=session.chat.plain_output(ids, stops=stops),
    )


def chat_request(
    session: Session,
    asked: ChatRequest,
    sampling: SamplingParams,
    stops: StopConditions,
    max_tokens: int | None,
) -> Request:
    """The answer to messages. Raises `ChatTemplateError` when the checkpoint has no template."""
    prompt = session.chat.encode(asked)
    return Request(
        tokens=prompt.ids,
        sampling=sampling,
        max_tokens=max_tokens,
        output=session.chat.output(prompt, tools=asked.tools or None, stops=stops),
    )


def _finish(deltas: list[Delta], *, json: bool, stats: bool, description: str) -> None:
    """What comes after the text. Raises the error that ended the generation, if one did."""
    finish = deltas[-1].finish
    assert finish is not None
    if finish.error is not None:
        raise finish.error
    if json:
        events = [event for one in deltas for event in one.events]
        document = {
            "text": "".join(one.text for one in deltas),
            "reasoning": "".join(one.text for one in events if isinstance(one, ReasoningDelta)),
            "tokens": [token for one in deltas for token in one.tokens],
            "finish_reason": finish.reason.value,
            "stop": finish.stop,
            "backend": description,
            "statistics": asdict(finish.statistics),
        }
        typer.echo(json_text(document), nl=False)
    if stats:
        print(statistics_line(finish.statistics), file=sys.stderr)
    if finish.reason is FinishReason.CANCELLED:
        raise typer.Exit(INTERRUPTED)
