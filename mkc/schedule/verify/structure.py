"""What can be seen without running a program: names, sizes, budgets, runs and guards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Product
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import Remembered
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SampledWalk
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.round_phases import masks_of
from mkc.schedule.verify.arrays import SCALAR_BYTES
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.arrays import scalars_of
from mkc.schedule.verify.arrays import semaphores_of
from mkc.schedule.verify.memory import Report
from mkc.targets import Target


def check_names(program: Program, report: Report) -> bool:
    """Every name in a phase exists; without that nothing else can be said."""
    streams = {one.name for one in program.streams}
    caches = {one.name for one in program.caches}
    exchanges = {one.name for one in program.exchanges}
    buffers = {one.name for one in program.buffers}
    operands = {one.name for one in program.operands}
    sound = True

    def check(phase: str, kind: str, name: str, known: set[str]) -> None:
        nonlocal sound
        if name not in known:
            sound = False
            report("V805", phase, f"there is no {kind} {name!r}")

    for stream in program.streams:
        check(stream.name, "operand", stream.array, operands)
    for cache in program.caches:
        for array in (cache.key_array, cache.value_array):
            check(cache.name, "operand", array, operands)
    check("tape", "operand", "tape", operands)
    if program.logits is not None:
        check("logits", "buffer", program.logits.buffer, buffers)
    scalars = {one.name for one in program.scalars}
    for phase in program.phases():
        for view in views_of(phase):
            check(phase.id, "buffer", view.buffer, buffers)
        for name in scalars_used(phase) if program.round is not None else ():
            check(phase.id, "scalar array", name, scalars)
        match phase:
            case EmbedPhase():
                check(phase.id, "operand", phase.table, operands)
            case NarrowMatmulPhase() | DeltaRulePhase():
                check(phase.id, "stream", phase.stream, streams)
            case StreamWaitPhase() | StreamAdvancePhase():
                check(phase.id, "stream", phase.stream, streams)
            case KeptDeltaRulePhase():
                for name in (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay):
                    check(phase.id, "stream", name, streams)
            case AttentionPhase() | RowsAttentionPhase():
                check(phase.id, "cache", phase.cache, caches)
            case RoutePhase() | ExpertsPhase():
                check(phase.id, "experts", phase.experts, {one.name for one in program.experts})
            case LatentAttentionPhase():
                check(phase.id, "cache", phase.cache, caches)
                check(phase.id, "stream", phase.up, streams)
            case AllReducePhase() | AllGatherPhase():
                check(phase.id, "exchange", phase.exchange, exchanges)
            case SelectorWalkPhase():
                check(phase.id, "operand", phase.predecessor, operands)
                check(phase.id, "operand", phase.successor, operands)
            case MarkovWalkPhase():
                check(phase.id, "operand", phase.predecessor, operands)
                for name in (phase.successor, phase.page):
                    check(phase.id, "stream", name, streams)
                for name in phase.exchanges:
                    check(phase.id, "exchange", name, exchanges)
            case TapPhase():
                check(phase.id, "buffer", phase.buffer, buffers)
            case ArgmaxPhase() | AcceptPhase() | TopKPhase():
                if phase.exchange:
                    check(phase.id, "exchange", phase.exchange, exchanges)
                sampling = phase.sampling if isinstance(phase, AcceptPhase) else None
                if sampling is not None and sampling.race is not None:
                    check(phase.id, "exchange", sampling.race, exchanges)
                if masks := masks_of(phase):
                    check(phase.id, "operand", masks, operands)
            case VectorPhase():
                for name in (*phase.states.values(), *filter(None, (phase.page,))):
                    check(phase.id, "stream", name, streams)
    return sound


def check_structure(program: Program, target: Target, report: Report) -> None:
    """Budgets, sizes, counts, runs and guards."""
    _check_budgets(program, target, report)
    _check_views(program, report)
    _check_streams(program, report)
    _check_counts(program, report)
    _check_taps(program, report)
    for loops, phase in _nested(program):
        if isinstance(phase, MatmulPhase):
            _check_runs(program, phase, report)
            for run in phase.runs:
                for guards in run.refill:
                    _check_guards(loops, phase, guards, report)


def vmem_bytes(program: Program, target: Target) -> dict[str, int]:
    """Bytes of every VMEM array with tile padding."""
    return {
        one.name: target.padded_bytes(one.shape, one.dtype.bytes)
        for one in arrays_of(program).values()
        if one.on_chip and not one.scalar
    }


def _check_budgets(program: Program, target: Target, report: Report) -> None:
    sizes = vmem_bytes(program, target)
    total, limit = sum(sizes.values()), min(target.vmem.usable_bytes, program.vmem_limit_bytes)
    if total > limit:
        largest = max(sizes, key=lambda name: sizes[name])
        message = f"{total} bytes of VMEM for {limit}; the largest array is {largest}"
        report("V801", "vmem", message)
    scalars = sum(scalars_of(program).values()) * SCALAR_BYTES
    if scalars > target.smem.usable_bytes:
        message = f"{scalars} bytes of scalars for {target.smem.usable_bytes} of SMEM"
        report("V802", "smem", message)
    count = sum(prod(one.shape) for one in semaphores_of(program).values())
    if count > target.semaphores.usable_count:
        message = f"{count} semaphores for {target.semaphores.usable_count}"
        report("V806", "semaphores", message)


def views_of(phase: Phase) -> Iterator[View]:
    """All views of a phase."""
    for part in fields(phase):
        value = getattr(phase, part.name)
        if isinstance(value, View):
            yield value
        elif isinstance(value, dict):
            yield from (one for one in value.values() if isinstance(one, View))
        elif isinstance(value, Remembered):
            yield from (value.k, value.v)
        elif isinstance(value, SampledWalk):
            yield value.proposal
        elif isinstance(value, tuple):
            for one in value:
                if isinstance(one, View):
                    yield one
                elif isinstance(one, Product):
                    yield from (one.left, one.output)


def scalars_used(phase: Phase) -> Iterator[str]:
    """Arrays of scalars of a phase of a round."""
    match phase:
        case EmbedPhase():
            yield phase.source
        case KeptDeltaRulePhase():
            yield from (phase.kept, phase.positions)
        case RowsAttentionPhase():
            yield from (phase.first, phase.positions)
            if phase.remembered is not None:
                yield phase.remembered.positions
        case AcceptPhase():
            yield from (phase.tokens, phase.positions, phase.emitted, phase.count, phase.last)
        case SelectorWalkPhase():
            yield from (phase.tokens, phase.output)
            if phase.sampling is not None:
                yield phase.sampling.positions
        case MarkovWalkPhase():
            yield from (phase.tokens, phase.output)
        case CutDraftsPhase():
            yield from (phase.positions, phase.output)
        case VectorPhase() | ScalarPhase():
            yield from phase.scalars.values()


def _check_views(program: Program, report: Report) -> None:
    buffers = {one.name: one for one in program.buffers}
    for one in program.buffers:
        if one.shape[1] > one.region_lanes:
            message = f"{one.name} has {one.shape[1]} lanes, its region {one.region_lanes}"
            report("V803", one.name, message)
        if one.shape[0] != program.padded_rows:
            report("V803", one.name, f"{one.shape[0]} rows, the program has {program.padded_rows}")
    regions: dict[str, tuple[object, ...]] = {}
    for one in program.buffers:
        found = (one.dtype, one.region_lanes, one.shape[0])
        if regions.setdefault(one.region, found) != found:
            report("V803", one.name, f"{one.region} is made in two ways")
    for phase in program.phases():
        views = list(views_of(phase))
        if isinstance(phase, MatmulPhase):
            whole = phase.blocks * TAPE_LANES
            views += [
                View(buffer=one.buffer, start=one.start, width=whole) for one in phase.outputs
            ]
            for left in phase.lefts:
                if left.width != phase.K:
                    message = f"{phase.K} lanes are contracted, the operand has {left.width}"
                    report("V803", phase.id, message)
        elif isinstance(phase, TapPhase):
            lanes = (max(phase.places) + 1) * phase.width
            views.append(View(buffer=phase.buffer, start=0, width=lanes))
        for view in views:
            lanes = buffers[view.buffer].shape[1]
            if not 0 <= view.start <= view.start + view.width <= lanes:
                message = f"lanes {view.start} to {view.start + view.width} of {view.buffer}, which"
                report("V803", phase.id, f"{message} has {lanes}")


def _check_streams(program: Program, report: Report) -> None:
    for stream in program.streams:
        if not 1 <= stream.slots <= stream.items:
            report("V804", stream.name, f"{stream.slots} slots for {stream.items} items")
        elif stream.writes_back and stream.slots == 1 < stream.items:
            message = "a slot is refilled one item after its write-back; one slot cannot do that"
            report("V804", stream.name, message)
    for cache in program.caches:
        if cache.slots < 1 or cache.tile < 1 or program.context % cache.tile:
            message = f"{cache.slots} tiles of {cache.tile} rows for a context of {program.context}"
            report("V804", cache.name, message)
    pages = {one.name: prod(one.item_shape[:-1]) for one in program.streams}
    for name, rows in program.pages.items():
        last = max(one.row + -(-one.length // 128) for one in rows)
        if last > pages.get(name, 0):
            report("V804", name, f"{last} rows of vectors in items of {pages.get(name, 0)} rows")
    for phase in program.phases():
        if isinstance(phase, NarrowMatmulPhase):
            stream = next(one for one in program.streams if one.name == phase.stream)
            columns = stream.item_shape[0] * TAPE_LANES // phase.K
            if columns < phase.columns:
                message = f"{phase.columns} columns from items of {columns}"
                report("V804", phase.id, message)


def _check_counts(program: Program, report: Report) -> None:
    """What the phases of one step use up is what the streams and the tape hold."""
    used: dict[str, int] = {}

    def use(name: str, amount: int) -> None:
        used[name] = used.get(name, 0) + amount

    for loops, phase in _nested(program):
        executions = prod(count for name, count in loops.items() if name != ROUNDS)
        match phase:
            case StreamAdvancePhase():
                use(phase.stream, executions)
            case VectorPhase():
                for name in dict.fromkeys(phase.states.values()):
                    use(name, executions)
            case DeltaRulePhase():
                use(phase.stream, executions * program.batch)
            case KeptDeltaRulePhase():
                for name in (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay):
                    use(name, executions * program.batch)
            case AttentionPhase() | RowsAttentionPhase() | LatentAttentionPhase():
                use(phase.cache, executions)
            case ExpertsPhase():
                use(phase.experts, executions)
            case MatmulPhase():
                use("tape", executions * phase.tape_rows)
    planned = {one.name: one.items for one in program.streams}
    planned |= {one.name: one.layers for one in program.caches}
    planned |= {one.name: one.layers for one in program.experts}
    planned["tape"] = program.tape.rows
    for name, amount in planned.items():
        if used.get(name, 0) != amount:
            message = f"a step uses {used.get(name, 0)} of {amount} items"
            report("V501", name, message)


def _check_taps(program: Program, report: Report) -> None:
    """A round stores one value in every place of the taps that is read, and reads no other."""
    written: dict[str, list[int]] = {}
    ends: dict[str, int] = {}
    for loops, phase in _nested(program):
        if not isinstance(phase, TapPhase):
            continue
        executions = prod(count for name, count in loops.items() if name != ROUNDS)
        if executions != len(phase.places):
            message = f"{executions} executions, places for {len(phase.places)}"
            report("V506", phase.id, message)
        written.setdefault(phase.buffer, []).extend(phase.places)
        ends[phase.buffer] = phase.width
    for phase in program.phases():
        for view in () if isinstance(phase, TapPhase) else views_of(phase):
            if view.buffer not in written:
                continue
            width = ends[view.buffer]
            for place in range(view.start // width, -(-(view.start + view.width) // width)):
                count = written[view.buffer].count(place)
                if count != 1:
                    message = f"place {place} of {view.buffer} is stored {count} times in a round"
                    report("V506", phase.id, message)


def _nested(program: Program) -> Iterator[tuple[dict[str, int], Phase]]:
    """Every phase with the loops around it, outermost first, and their counts."""

    def visit(
        body: tuple[Phase | Loop, ...], loops: dict[str, int]
    ) -> Iterator[tuple[dict[str, int], Phase]]:
        for item in body:
            if isinstance(item, Loop):
                yield from visit(item.body, {**loops, item.name: item.count})
            else:
                yield loops, item

    rounds = program.rounds_per_launch
    yield from visit(program.body, {ROUNDS: rounds} if rounds > 1 else {})


def _check_runs(program: Program, phase: MatmulPhase, report: Report) -> None:
    expected = 0
    for run in phase.runs:
        if run.first != expected or run.count < 1:
            report("V503", phase.id, f"step {expected} is followed by a run from {run.first}")
        if len(run.refill) != phase.loads_per_step:
            message = f"{len(run.refill)} refills for {phase.loads_per_step} loads of a step"
            report("V503", phase.id, message)
        sizes = {phase.load_rows(step) for step in range(run.first, run.first + run.count)}
        if len(sizes) > 1:
            report("V503", phase.id, f"a run has loads of {sorted(sizes)} rows")
        if max(sizes, default=0) > program.tape.slot_rows:
            message = f"a load of {max(sizes)} rows in slots of {program.tape.slot_rows}"
            report("V804", phase.id, message)
        expected = run.first + run.count
    if expected != phase.steps:
        report("V503", phase.id, f"{expected} of {phase.steps} steps are in runs")
    if phase.K % phase.loads_per_step:
        report("V503", phase.id, f"K {phase.K} in {phase.loads_per_step} loads")


def _check_guards(
    loops: dict[str, int], phase: MatmulPhase, guards: tuple[Guard, ...], report: Report
) -> None:
    """The kernel asks the guards in order; the last one stands for everything else."""
    if not guards:
        report("V502", phase.id, "a refill without any case")
        return
    asked: set[str] = set()
    for guard in guards:
        names = {*guard.ended, *([guard.loop] if guard.loop else [])}
        foreign = names - loops.keys()
        if foreign:
            report("V502", phase.id, f"a guard asks for {min(foreign)}, which is not around it")
            return
        surplus = set(guard.ended) - asked
        if len(guards) > 1 and (
            not asked <= set(guard.ended) or any(loops[name] > 1 for name in surplus)
        ):
            message = f"a guard expects {guard.ended} to have ended where {sorted(asked)} have"
            report("V502", phase.id, message)
        if guard.loop:
            asked.add(guard.loop)
    if len(guards) > 1 and guards[-1].loop is not None and loops[guards[-1].loop] > 1:
        report("V502", phase.id, f"no guard for the end of {guards[-1].loop}")
