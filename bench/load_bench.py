"""Memory and time of loading a checkpoint without a packed folder; prints a table.

    .venv/bin/python -m bench.load_bench              # 1 GB, about a minute
    .venv/bin/python -m bench.load_bench --gb 8

The checkpoint is that of `bench/pack_bench.py`. The devices are simulated ones of the CPU, so the
operands of the kernel are in the memory of the process too: what loading needs is counted beside
them and beside what the process had before. It is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from bench.pack_bench import CONTEXT
from bench.pack_bench import GIGABYTE
from bench.pack_bench import MEGABYTE
from bench.pack_bench import ROOM_BYTES
from bench.pack_bench import ROOT
from bench.pack_bench import TARGET
from bench.pack_bench import depth
from bench.pack_bench import largest_group
from bench.pack_bench import peak_memory
from bench.pack_bench import print_table
from bench.pack_bench import write_checkpoint
from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.filling import PORTION_BYTES
from mkc.runtime.filling import read_operands
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.targets import load_target
from models.qwen38 import MODEL


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One run of loading.

    Attributes:
      operand_bytes: what the devices hold.
      beside_bytes: the most that was held besides, and besides what was held before.
      group_bytes: the tensors of the largest matrix, as the checkpoint stores them.
    """

    seconds: float
    operand_bytes: int
    beside_bytes: int
    group_bytes: int


def load(source: Path, ranks: int, portion_bytes: int) -> Loaded:
    """Loads once in this process."""
    jax.config.update("jax_num_cpu_devices", ranks)
    jax.config.update("jax_platforms", "cpu")
    checkpoint = Checkpoint.open(source)
    graph = MODEL.trace(checkpoint.config, batch=1, context=CONTEXT)
    target = load_target(TARGET)
    lowered = lower_graph(graph, target, tp=ranks)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()),
        interpret=True,
    )
    checkpoint.check(graph)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what is held now
    before, start = peak_memory(), time.perf_counter()
    operands, _ = read_operands(checkpoint, lowered, session.format_of, portion_bytes=portion_bytes)
    jax.block_until_ready(operands)
    seconds = time.perf_counter() - start
    held = sum(part.data.nbytes for one in operands.values() for part in one.addressable_shards)
    return Loaded(
        seconds=seconds,
        operand_bytes=held,
        beside_bytes=peak_memory() - before - held,
        group_bytes=largest_group(lowered, checkpoint),
    )


def load_in_process(source: Path, ranks: int, portion_bytes: int) -> Loaded:
    """Loads in a new process."""
    command = [sys.executable, "-m", "bench.load_bench", "--child", str(source)]
    options = ["--tp", str(ranks), "--portion-bytes", str(portion_bytes)]
    child = subprocess.run(
        [*command, *options], stdout=subprocess.PIPE, check=True, cwd=ROOT, env={**os.environ}
    )
    return Loaded(**json.loads(child.stdout))


def main() -> None:
    """Makes the checkpoint, loads it, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--tp", type=int, default=8, help="ranks")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder otherwise")
    parser.add_argument("--portion-bytes", type=int, default=PORTION_BYTES, help="see filling.py")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(asdict(load(options.child, options.tp, options.portion_bytes))))
        return
    with TemporaryDirectory(prefix="mkc-bench-", dir=options.folder) as name:
        size = write_checkpoint(Path(name), depth(int(options.gb * GIGABYTE)))
        found = load_in_process(Path(name), options.tp, options.portion_bytes)
    bound = 2 * found.group_bytes + ROOM_BYTES
    print_table(
        [
            ("checkpoint", f"{size / GIGABYTE:.2f} GB"),
            ("loaded for", f"{options.tp} ranks"),
            ("operands on the devices", f"{found.operand_bytes / MEGABYTE:.0f} MB"),
            ("loading", f"{size / MEGABYTE / found.seconds:.0f} MB/s"),
            ("memory beside the operands", f"{found.beside_bytes / MEGABYTE:.0f} MB"),
            ("bound of memory", f"{bound / MEGABYTE:.0f} MB"),
        ]
    )
    if found.beside_bytes > bound:
        sys.exit("the bound of memory was missed")


if __name__ == "__main__":
    main()
