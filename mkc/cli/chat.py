"""`mkc chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field
from typing import Annotated
from typing import Any

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
from mkc.cli.generation import launch_of
from mkc.cli.generation import open_session
from mkc.cli.generation import sampling_of
from mkc.cli.generation import statistics_line
from mkc.cli.run import chat_request
from mkc.cli.speculation import NONE
from mkc.cli.speculation import DraftOption
from mkc.cli.speculation import SpecOption
from mkc.errors import MkcError
from mkc.errors import PromptLengthError
from mkc.runtime.distributed import START_SECONDS
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import ReasoningDelta
from mkc.runtime.text import StopConditions

PROMPT = "> "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
HELP = """\
/reset         forget the conversation
/stats         what the last answer and the conversation took
/draft on|off  whether a drafter proposes tokens
/help          this list
/exit          leave; so does Ctrl-D
Ctrl-C ends an answer. The arrow keys edit a line and bring back earlier ones."""
TOO_LONG = "the prompt is the whole conversation: /reset forgets it"
NO_DRAFTER = "no drafter is loaded: every round emits one token, with /draft on and off"


def chat_command(
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
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    think: ThinkOption = None,
    quiet: QuietOption = False,
    distributed: DistributedOption = False,
    coordinator: CoordinatorOption = None,
    processes: ProcessesOption = None,
    process: ProcessOption = None,
    start_timeout: StartTimeoutOption = START_SECONDS,
) -> None:
    """Chat with a model. /help lists the commands."""
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
    conversation = Conversation(
        session=session, sampling=sampling, max_tokens=max_tokens, system=system, thinking=think
    )
    with suppress(ImportError):  # arrow keys and history, where the platform has them
        import readline  # noqa: F401
    while (line := _read()) is not None:
        if line and not conversation.read(line):
            return


def _read() -> str | None:
    """A line of the user; None at the end of the input."""
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


@dataclass(kw_only=True)
class Conversation:
    """What has been said so far.

    Attributes:
      system: the system message.
      thinking: whether the model thinks; None leaves it to the template.
      last: statistics of the last answer.
      answered: tokens of all answers.
    """

    session: Session
    sampling: SamplingParams
    max_tokens: int | None
    system: str | None
    thinking: bool | None
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: SequenceStatistics | None = None
    answered: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def read(self, line: str) -> bool:
        """Does what a line says. False when the conversation is over."""
        match line.split():
            case ["/exit" | "/quit"]:
                return False
            case ["/reset"]:
                self.reset()
                print("the conversation is forgotten")
            case ["/stats"]:
                self.print_statistics()
            case ["/draft", "on" | "off" as wanted]:
                self.session.generator.drafts = wanted == "on"
                print(self.drafting)
            case ["/help"]:
                print(HELP)
            case [word, *_] if word.startswith("/"):
                print(f"there is no command {line}\n{HELP}")
            case _:
                self.answer(line)
        return True

    def reset(self) -> None:
        """Begins anew."""
        self.messages = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})

    @property
    def _has_turns(self) -> bool:
        return any(one["role"] != "system" for one in self.messages)

    @property
    def drafting(self) -> str:
        """Whether tokens are drafted, and by what."""
        if self.session.scheme == NONE:
            return NO_DRAFTER
        state = "on" if self.session.generator.drafts else "off: every round emits one token"
        return f"drafts of {self.session.scheme} are {state}"

    def answer(self, text: str) -> None:
        """Prints the answer as it comes; an error is printed and takes the question back."""
        known = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            self._stream()
        except MkcError as error:
            print(error.report(), file=sys.stderr)
            del self.messages[known:]
            if isinstance(error, PromptLengthError) and self._has_turns:
                print(TOO_LONG, file=sys.stderr)

    def print_statistics(self) -> None:
        """What runs, the last answer, the prefix cache."""
        print(self.session.description)
        print(self.drafting)
        if self.last is not None:
            print(statistics_line(self.last))
        cache = self.session.generator.prefix_cache
        assert cache is not None
        seen = cache.statistics
        print(
            f"{self.answered} tokens answered; prefix cache: {seen.hit_tokens} of "
            f"{seen.prompt_tokens} prompt tokens, {cache.bytes / 1e6:.1f} MB"
        )

    def _stream(self) -> None:
        asked = ChatRequest(messages=self.messages, thinking=self.thinking)
        request = chat_request(
            self.session, asked, self.sampling, StopConditions(), self.max_tokens
        )
        content: list[str] = []
        thoughts: list[str] = []
        styled = sys.stdout.isatty()
        for delta in self.session.stream(request):
            for event in delta.events:
                if isinstance(event, ReasoningDelta):
                    thoughts.append(event.text)
                    print(f"{DIM}{event.text}{PLAIN}" if styled else event.text, end="")
                elif isinstance(event, ContentDelta):
                    if thoughts and not content:
                        print()  # an answer begins on a line of its own
                    content.append(event.text)
                    print(event.text, end="")
            sys.stdout.flush()
            if delta.finish is not None:
                self.last = delta.finish.statistics
                self.answered += self.last.output_tokens
                if delta.finish.error is not None:
                    raise delta.finish.error
        print()
        message = {"role": "assistant", "content": "".join(content)}
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        self.messages.append(message)
