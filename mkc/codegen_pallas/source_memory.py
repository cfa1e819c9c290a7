"""The memory of a generated kernel: its scratch arrays, and the names that phases use."""

from __future__ import annotations

from mkc.codegen_pallas.phases import lookup_name
from mkc.codegen_pallas.phases_experts import memory_lines
from mkc.codegen_pallas.phases_experts import scratch_of
from mkc.codegen_pallas.source_sampled import sampling_scratch
from mkc.ir.types import DType
from mkc.passes.p50_residency import EMBED_ROWS
from mkc.passes.p50_residency import new_rows
from mkc.passes.walk_scratch import markov_scratch
from mkc.passes.walk_scratch import walk_scratch
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import SelectorWalkPhase


def kernel_function(program: Program) -> str:
    """`kernel`, which names the parts of the memory and runs the step."""
    lines = [
        "def kernel(m):",
        '    """Names the parts of the memory and runs the step."""',
        "    m.tape = support.Tape(",
        "        hbm=m.tape,",
        "        ring=m.tape_ring,",
        "        sems=m.tape_sems,",
        f"        slots={program.tape.slots},",
    ]
    if program.rounds_per_launch > 1:
        lines.append(f"        rows={program.tape.rows},")
    lines.append("    )")
    if program.rounds_per_launch > 1 and program.round is None:
        lines += [
            "    m.tokens_in, m.tokens, m.next_token = m.tokens, m.round_tokens, m.round_tokens",
            "    m.positions_in, m.positions = m.positions, m.round_positions",
        ]
    for stream in program.streams:
        array = f"m.{stream.array}_out" if stream.writes_back else f"m.{stream.array}"
        written = f"m.{stream.name}_written" if stream.writes_back else "None"
        lines += [
            f"    m.{stream.name} = support.Stream(",
            f"        hbm={array},",
            f"        ring=m.{stream.name}_ring,",
            f"        arrived=m.{stream.name}_arrived,",
            f"        written={written},",
            f"        items={stream.items},",
            f"        slots={stream.slots},",
            "    )",
        ]
    for cache in program.caches:
        lines += [
            f"    m.{cache.name} = support.KvStream(",
            f"        key_hbm=m.{cache.key_array}_out,",
            f"        value_hbm=m.{cache.value_array}_out,",
            f"        key_ring=m.{cache.name}_key_ring,",
            f"        value_ring=m.{cache.name}_value_ring,",
            f"        arrived=m.{cache.name}_arrived,",
            f"        key_new=m.{cache.name}_key_new,",
            f"        value_new=m.{cache.name}_value_new,",
            f"        written=m.{cache.name}_written,",
            f"        awake=m.{cache.name}_awake,",
            f"        layers={cache.layers},",
            f"        slots={cache.slots},",
            f"        tile={cache.tile},",
            *([f"        window={cache.window},"] if cache.window else []),
            "    )",
        ]
    lines += memory_lines(program)
    for buffer in program.buffers:
        rows, width = buffer.shape
        whole = "" if width == buffer.region_lanes else f".at[:, 0:{width}]"
        lines.append(f"    m.{buffer.name} = m.{buffer.region}{whole}  # {buffer.purpose}")
    lines.append("    step(m)")
    return "\n".join(lines)


def scratch(program: Program) -> list[tuple[str, str, tuple[int, ...]]]:
    """VMEM arrays and semaphores: (name, dtype or `dma`, shape)."""
    tape = program.tape
    found: list[tuple[str, str, tuple[int, ...]]] = [
        ("tape_ring", DType.BF16.value, (tape.slots, tape.slot_rows, TAPE_LANES)),
        ("tape_sems", "dma", (tape.slots,)),
    ]
    found += _scalar_scratch(program)
    for stream in program.streams:
        found.append(
            (f"{stream.name}_ring", stream.dtype.value, (stream.slots, *stream.item_shape))
        )
        found.append((f"{stream.name}_arrived", "dma", (stream.slots,)))
        if stream.writes_back:
            found.append((f"{stream.name}_written", "dma", (stream.slots,)))
    for cache in program.caches:
        tiles, new = (
            [(*shape, width) for width in cache.widths]
            for shape in ((cache.slots, cache.tile), (cache.batch, new_rows(cache)))
        )
        found += [
            (f"{cache.name}_key_ring", DType.BF16.value, tiles[0]),
            (f"{cache.name}_value_ring", DType.BF16.value, tiles[1]),
            (f"{cache.name}_arrived", "dma", (2, cache.slots)),
            (f"{cache.name}_key_new", DType.BF16.value, new[0]),
            (f"{cache.name}_value_new", DType.BF16.value, new[1]),
            (f"{cache.name}_written", "dma", (2, cache.batch)),
            (f"{cache.name}_awake", "scalars", (cache.batch,)),
        ]
    found += scratch_of(program)
    for exchange in program.exchanges:
        for suffix, shape, dtype in exchange_buffers(exchange, program.ranks):
            found.append((f"{exchange.name}_{suffix}", dtype.value, shape))
        found.append((f"{exchange.name}_sems", "dma", (exchange.semaphores,)))
    regions = {one.region: one for one in program.buffers}
    for name in sorted(regions, key=lambda region: int(region.rsplit("_", 1)[1])):
        one = regions[name]
        found.append((name, one.dtype.value, (one.shape[0], one.region_lanes)))
    lookups = {lookup_name(one): one for one in program.phases() if isinstance(one, EmbedPhase)}
    for name, lookup in lookups.items():
        blocks = (program.rows, EMBED_ROWS, lookup.output.width)
        found.append((f"{name}_blocks", DType.BF16.value, blocks))
        found.append((f"{name}_sem", "dma", (1,)))
    for phase in program.phases():
        if isinstance(phase, SelectorWalkPhase):
            found += [
                (f"{phase.id}_{one.name}", one.kind, one.shape)
                for one in walk_scratch(phase.k, phase.rank, program.batch, program.padded_rows)
            ]
        elif isinstance(phase, MarkovWalkPhase):
            found += [
                (f"{phase.id}_{one.name}", one.kind, one.shape)
                for one in markov_scratch(phase.rank, phase.logits.width, program.batch)
            ]
    for operand in program.operands:
        if operand.role == "token_masks":
            found.append((f"{operand.name}_block", operand.dtype.value, operand.shape))
            found.append((f"{operand.name}_sem", "dma", (1,)))
    if program.logits is not None:
        found.append(("logits_sem", "dma", (1,)))
    return found


def _scalar_scratch(program: Program) -> list[tuple[str, str, tuple[int, ...]]]:
    if program.round is not None:
        return [
            *((one.name, "scalars", (one.size,)) for one in program.scalars),
            ("s_budgets", "scalars", (program.batch,)),
            *sampling_scratch(program, program.round),
        ]
    if program.rounds_per_launch > 1:
        names = ("round_tokens", "round_positions")
        return [(name, "scalars", (program.batch,)) for name in names]
    return []
