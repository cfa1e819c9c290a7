"""Speed and memory of packing a synthetic checkpoint, beside copying its bytes; prints a table.

    .venv/bin/python bench/pack_bench.py              # 1 GB, a few seconds
    .venv/bin/python bench/pack_bench.py --gb 8       # proves the bound of memory

The checkpoint has random finite bf16 weights, in files of one gigabyte, in the shapes of the 27B
family at hidden size 2048; its depth follows from the size. Copying and packing take turns, both
end with fsync, and both read the source from wherever the system has it, usually the page cache.
The memory of packing is that of a process of its own, the interpreter and all imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mkc.driver import lower_graph
from mkc.ir.graph import Graph
from mkc.passes.pipeline import Lowered
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import INDEX
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from mkc.runtime.layout import TapePiece
from mkc.runtime.layout import pack_layout
from mkc.runtime.safetensors_file import header_bytes
from mkc.targets import load_target
from models.qwen38 import MODEL

ROOT = Path(__file__).resolve().parents[1]
FULL_CONFIG = ROOT / "models" / "configs" / "qwen38_27b.json"
TARGET = "tpu7x:2x2x1"
CONTEXT = 256
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 32768}
PERIOD = 4  # layers of the family's pattern
FILE_BYTES = 1_000_000_000
CHUNK_ELEMENTS = 8 << 20
FINITE = np.uint16(0xBFFF)  # clears the highest exponent bit
MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000
ROOM_BYTES = GIGABYTE  # what packing may need beside twice the largest group of tensors
WANTED_RATIO = 0.6


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One run of packing.

    Attributes:
      processor_seconds: of all threads; with free cores `seconds` is near its half.
      group_bytes: the tensors of the largest matrix or table, as the checkpoint stores them.
    """

    seconds: float
    processor_seconds: float
    peak_bytes: int
    packed_bytes: int
    group_bytes: int


def config(layers: int) -> dict[str, Any]:
    """The family's config, narrower, with some depth."""
    document: dict[str, Any] = json.loads(FULL_CONFIG.read_text(encoding="utf-8"))
    text = document["text_config"]
    text.update(SIZES)
    text["num_hidden_layers"] = layers
    text["layer_types"] = (text["layer_types"][:PERIOD] * layers)[:layers]
    return document


def graph_of(layers: int) -> Graph:
    return MODEL.trace(config(layers), batch=1, context=CONTEXT)


def graph_bytes(graph: Graph) -> int:
    return sum(one.type.bytes * one.instances for one in graph.params.values())


def depth(size: int) -> int:
    """Layers, whole periods, with which the checkpoint is nearest to `size` bytes."""
    once = graph_bytes(graph_of(PERIOD))
    period = graph_bytes(graph_of(2 * PERIOD)) - once
    return PERIOD * max(1, 1 + round((size - once) / period))


def write_checkpoint(folder: Path, layers: int) -> int:
    """Writes random weights. Returns their bytes."""
    (folder / CONFIG).write_text(json.dumps(config(layers)), encoding="utf-8")
    shapes = {
        name: ("BF16" if param.type.dtype.bytes == 2 else "F32", param.type.shape)
        for param in graph_of(layers).params.values()
        for name in param.tensor_names()
    }
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in shapes.items():
        size = int(np.prod(shape)) * (2 if dtype == "BF16" else 4)
        if filled and filled + size > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = (dtype, shape)
        filled += size
    generator = np.random.default_rng(0)
    placed = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        placed.update(dict.fromkeys(tensors, name))
        with (folder / name).open("wb") as file:
            file.write(header_bytes(tensors))
            for dtype, shape in tensors.values():
                left = int(np.prod(shape)) * (1 if dtype == "BF16" else 2)
                while left:
                    count = min(left, CHUNK_ELEMENTS)
                    words = np.frombuffer(generator.bytes(2 * count), np.uint16)
                    file.write(np.bitwise_and(words, FINITE))
                    left -= count
            file.flush()
            os.fsync(file.fileno())
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def copy(source: Path, target: Path) -> float:
    """Seconds to copy all weights and to have them on the disk."""
    target.mkdir()
    start = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    remove(target)
    return seconds


def remove(folder: Path) -> None:
    """Removes a folder and waits until the disk is done with it, which is no part of a next run."""
    shutil.rmtree(folder)
    os.sync()


def pack_in_process(source: Path, target: Path, ranks: int) -> Packed:
    """Packs in a new process."""
    command = [sys.executable, __file__, "--child", str(source), str(target), "--tp", str(ranks)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    remove(target)
    return Packed(**json.loads(child.stdout))


def child(source: Path, target: Path, ranks: int) -> None:
    """Packs once and prints what it took."""
    checkpoint = Checkpoint.open(source)
    graph = MODEL.trace(checkpoint.config, batch=1, context=CONTEXT)
    lowered = lower_graph(graph, load_target(TARGET), tp=ranks)
    start, started = time.perf_counter(), time.process_time()
    result = pack(checkpoint, lowered, target)
    measured = Packed(
        seconds=time.perf_counter() - start,
        processor_seconds=time.process_time() - started,
        peak_bytes=peak_memory(),
        packed_bytes=result.bytes,
        group_bytes=largest_group(lowered, checkpoint),
    )
    print(json.dumps(asdict(measured)))


def peak_memory() -> int:
    """Largest resident memory of this process, on Linux; `getrusage` counts its parent's too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(one for one in status.splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def largest_group(lowered: Lowered, checkpoint: Checkpoint) -> int:
    """Bytes of the tensors that are packed together, where they are largest."""
    groups = [
        sum(checkpoint.tensors[name].bytes for name in {one.tensor for one in matrix.rows})
        for piece in pack_layout(lowered).pieces
        if isinstance(piece, TapePiece)
        for matrix in piece.matrices[:1]
    ]
    return max(groups)


def print_table(rows: list[tuple[str, str]]) -> None:
    """Two columns of Markdown."""
    width = max(len(label) for label, _ in rows)
    values = max(len(value) for _, value in rows)
    print(f"| {'':{width}} | {'':{values}} |\n|{'-' * (width + 2)}|{'-' * (values + 1)}:|")
    for label, value in rows:
        print(f"| {label:{width}} | {value:>{values}} |")


def main() -> None:
    """Makes the checkpoint, copies and packs it in turns, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--tp", type=int, default=8, help="ranks")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder otherwise")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.tp)
        return
    busy = os.getloadavg()[0]
    layers = depth(int(options.gb * GIGABYTE))
    with TemporaryDirectory(prefix="mkc-bench-", dir=options.folder) as name:
        source = Path(name, "checkpoint")
        source.mkdir()
        size = write_checkpoint(source, layers)
        copies, packs = [], []
        for _ in range(options.repeats):
            copies.append(copy(source, Path(name, "copy")))
            packs.append(pack_in_process(source, Path(name, "packed"), options.tp))
    report(size, layers, options.tp, busy, copies, packs)


def report(
    size: int, layers: int, ranks: int, busy: float, copies: list[float], packs: list[Packed]
) -> None:
    """Prints the table; speeds are source bytes over time.

    The wanted ratio is judged by the fastest run of each: whatever else the machine does makes runs
    slower, never faster, and packing more than copying, which hardly needs a processor.

    Args:
      busy: load average before the runs.
    """
    copied = [size / MEGABYTE / one for one in copies]
    packed = [size / MEGABYTE / one.seconds for one in packs]
    peak = max(one.peak_bytes for one in packs)
    packing = median(one.processor_seconds for one in packs)
    bound = 2 * packs[0].group_bytes + ROOM_BYTES
    ratio = max(packed) / max(copied)
    usual = median(packed) / median(copied)
    print_table(
        [
            ("checkpoint", f"{size / GIGABYTE:.2f} GB, {layers} layers"),
            ("packed for", f"{ranks} ranks, {packs[0].packed_bytes / GIGABYTE:.2f} GB"),
            ("copying with fsync, fastest", f"{max(copied):.0f} MB/s"),
            ("all", ", ".join(f"{one:.0f}" for one in copied)),
            ("packing with fsync, fastest", f"{max(packed):.0f} MB/s"),
            ("all", ", ".join(f"{one:.0f}" for one in packed)),
            ("processor time of packing", f"{packing:.2f} s"),
            ("busy processors before", f"{busy:.1f} of {os.cpu_count()}"),
            ("packing / copying", f"{100 * ratio:.0f} % ({100 * WANTED_RATIO:.0f} % wanted)"),
            ("the same of medians", f"{100 * usual:.0f} %"),
            ("largest tensor group", f"{packs[0].group_bytes / MEGABYTE:.0f} MB"),
            ("peak memory of packing", f"{peak / MEGABYTE:.0f} MB"),
            ("bound of memory", f"{bound / MEGABYTE:.0f} MB"),
        ]
    )
    if ratio < WANTED_RATIO or peak > bound:
        sys.exit("the wanted speed or the bound of memory was missed")


if __name__ == "__main__":
    main()
