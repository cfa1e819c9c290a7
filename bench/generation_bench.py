"""Speed of generation on this machine, beside what is wanted; prints a table.

    .venv/bin/python bench/generation_bench.py                     # the model that comes with mkc
    .venv/bin/python bench/generation_bench.py --weights FOLDER    # another small one
    .venv/bin/python bench/generation_bench.py --only host         # no model runs

Times are of this machine's CPU, not of a TPU. The time to the first token is that of a whole `mkc
chat` process, from its start to the first character of the answer: cold with an empty compilation
cache, warm with what the cold one left there. Rates are those of `mkc bench`, whose warm-up is not
measured. The host's time per launch is what the generator needs outside the calls of a backend, for
three sequences at once; that backend is a stand-in that only hands out logits. It is processor
time: the generator waits for nothing, so on an idle machine it is also what passes. Everything else
that is wanted is judged by the time that passes; on a busy machine look at the processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mkc.runtime.backends import BackendName
from mkc.runtime.backends import Snapshot
from mkc.runtime.backends import StepResult
from mkc.runtime.measure import Load
from mkc.runtime.measure import measure
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.text import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]
MKC = Path(sys.executable).with_name("mkc")
TINY = ROOT / "models" / "tiny"

QUESTION = "What is 12 + 7?"
BATCH = 3
LARGE_VOCABULARY = 248_320
LIKELY_TOKENS = 20  # that have nearly all of the mass, as those of a trained model
REPEATS = 5  # the fastest run counts: whatever else the machine does makes runs slower
WANTED_HOST_MS = 1.0
WANTED_COLD_S = 15.0
WANTED_WARM_S = 5.0
WANTED_RATES = {"interpret": 20.0, "reference": 200.0}

NO_DRAFTS = ("--spec", "none")
MEASURED = {  # options of `mkc bench`; its prompts are random, which no drafter is made for
    "greedy, without drafts": NO_DRAFTS,
    "sampled, without drafts": (*NO_DRAFTS, "--temperature", "1"),
    "greedy, drafts after random prompts": (),
}

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=1.0),
    "top-k, top-p": SamplingParams(temperature=1.0, top_k=20, top_p=0.95),
    "top-p": SamplingParams(temperature=1.0, top_p=0.95),
    "penalties, top-k": SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1),
    "log-probabilities": SamplingParams(temperature=0.0, alternatives=5),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; `met` is None where nothing is wanted."""

    what: str
    measured: str
    wanted: str = ""
    met: bool | None = None


class Stand:
    """Stands in for a model: the same logits in every round."""

    name: BackendName = "reference"
    prefill_rows = 256
    stop_ids_per_launch = 8
    rounds_per_launch = 8
    context = 4096
    batch = BATCH

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        random = np.random.default_rng(0)
        self._logits = random.normal(0, 3, (BATCH, vocab)).astype(np.float32)
        self._logits[:, :LIKELY_TOKENS] += 18

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        return self._logits[slot]

    def step(self, *arguments: Any, **options: Any) -> StepResult:
        return StepResult(next_token=np.zeros(BATCH, np.int32), logits=self._logits)

    def greedy_rounds(self, *arguments: Any, rounds: Sequence[int], **options: Any) -> Array:
        return np.ones((max(rounds), BATCH), np.int32)

    def reset(self, slot: int) -> None:
        """Nothing is remembered."""

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        return Snapshot(start=start, end=end, fixed={}, rows={})

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        """Nothing is remembered."""

    def state(self, slot: int) -> dict[str, Array]:
        return {}


def host_rows(weights: Path) -> list[Row]:
    """Milliseconds per launch outside the backend, text of the checkpoint's tokenizer included."""
    rows = []
    tokenizer = load_tokenizer(weights)
    for vocab, tokens in ((tokenizer.vocab_size, 257), (LARGE_VOCABULARY, 33)):
        wanted = vocab != LARGE_VOCABULARY
        for name, sampling in SAMPLINGS.items():
            load = Load(batch=BATCH, prompt_tokens=8, output_tokens=tokens, sampling=sampling)
            runs = [
                measure(
                    Stand(vocab), load, tokenizer=tokenizer, clock=time.thread_time
                ).outside_per_launch
                for _ in range(REPEATS)
            ]
            milliseconds = 1e3 * min(runs)
            rows.append(
                Row(
                    what=f"host per launch, {BATCH} sequences, {vocab} tokens, {name}",
                    measured=f"{milliseconds:.3f} ms",
                    wanted=f"<= {WANTED_HOST_MS:.0f} ms" if wanted else "",
                    met=milliseconds <= WANTED_HOST_MS if wanted else None,
                )
            )
    return rows


def command_rows() -> list[Row]:
    """How long the command line itself takes."""
    seconds, busy = min(_timed([str(MKC), "--help"]) for _ in range(REPEATS))
    return [Row(what="mkc --help", measured=f"{seconds:.2f} s ({busy:.2f} s of processor)")]


def first_token_rows(weights: Path, context: int) -> list[Row]:
    """Seconds from the start of `mkc chat` to the first character of its answer."""
    rows = []
    for backend in WANTED_RATES:
        with TemporaryDirectory(prefix="mkc-bench-") as cache:
            for state, wanted in (("cold", WANTED_COLD_S), ("warm", WANTED_WARM_S)):
                seconds, busy = first_token(weights, backend, context, cache)
                rows.append(
                    Row(
                        what=f"first token of mkc chat, {backend}, {state}",
                        measured=f"{seconds:.1f} s ({busy:.1f} s of processor)",
                        wanted=f"<= {wanted:.0f} s",
                        met=seconds <= wanted,
                    )
                )
    return rows


def first_token(weights: Path, backend: str, context: int, cache: str) -> tuple[float, float]:
    """Wall and processor time of the process up to the first character."""
    options = ["--backend", backend, "--context", str(context), "--quiet", "--max-tokens", "16"]
    start = time.perf_counter()
    child = subprocess.Popen(
        [str(MKC), "chat", str(weights), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(cache),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{QUESTION}\n".encode())
    child.stdin.close()
    first = child.stdout.read(1)
    seconds, busy = time.perf_counter() - start, _seconds_of(child.pid)
    child.stdout.read()
    if child.wait() != 0 or not first:
        sys.exit(f"mkc chat ended with status {child.returncode}")
    return seconds, busy


def rate_rows(weights: Path, context: int) -> list[Row]:
    """Tokens per second of decoding, one sequence."""
    rows = []
    for backend, wanted in WANTED_RATES.items():
        for label, sampling in MEASURED.items():
            found = bench(weights, backend, context, sampling)
            rate = found["decode_tokens_per_second"]
            rows.append(
                Row(
                    what=f"decoding, {backend}, {label}",
                    measured=f"{rate:.0f} tokens/s ({found['host_ms_per_launch']:.2f} ms host)",
                    wanted=f">= {wanted:.0f}",
                    met=rate >= wanted,
                )
            )
    return rows


def bench(weights: Path, backend: str, context: int, sampling: Sequence[str]) -> dict[str, Any]:
    """The one run of `mkc bench`."""
    options = ["--backend", backend, "--context", str(context), "--quiet", "--json"]
    sizes = ["--prompt-tokens", "32", "--output-tokens", "161"]
    command = [str(MKC), "bench", str(weights), *options, *sizes, *sampling]
    with TemporaryDirectory(prefix="mkc-bench-") as cache:
        child = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=_environment(cache))
    found: dict[str, Any] = json.loads(child.stdout)["runs"][0]
    return found


def _timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and processor seconds of a command."""
    before, start = _children_seconds(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start, _children_seconds() - before


def _seconds_of(process: int) -> float:
    """Processor time of a running process and its threads, on Linux."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    user, system = fields[11:13]  # the state behind the name is the first field here
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(cache: str) -> dict[str, str]:
    given = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    return {**given, "MKC_CACHE": cache}


def print_table(rows: Sequence[Row]) -> None:
    """Markdown, aligned, so that it can be pasted anywhere."""
    met = {True: "yes", False: "no", None: ""}
    lines = [("", "measured", "wanted", "met")]
    lines += [(one.what, one.measured, one.wanted, met[one.met]) for one in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    for number, line in enumerate(lines):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def main() -> None:
    """Measures and prints the table; exit status 1 when something wanted is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=TINY, help="checkpoint folder")
    parser.add_argument("--context", type=int, default=512, help="positions")
    parser.add_argument("--only", choices=("host", "first-token", "rates"), help="one part")
    options = parser.parse_args()
    parts = {
        "host": lambda: command_rows() + host_rows(options.weights),
        "first-token": lambda: first_token_rows(options.weights, options.context),
        "rates": lambda: rate_rows(options.weights, options.context),
    }
    busy = os.getloadavg()[0]
    rows = [Row(what="busy processors before", measured=f"{busy:.1f} of {os.cpu_count()}")]
    for name, part in parts.items():
        if options.only in (None, name):
            print(f"measuring: {name}", file=sys.stderr)
            rows += part()
    print_table(rows)
    if any(one.met is False for one in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
