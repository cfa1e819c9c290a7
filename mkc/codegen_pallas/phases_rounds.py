"""The source of the phases that only speculative rounds have; see `phases`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from mkc.ir import ops_spec
from mkc.passes.walk_scratch import markov_scratch
from mkc.passes.walk_scratch import walk_scratch
from mkc.schedule.program import Phase
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SampledAccept
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase

if TYPE_CHECKING:
    from mkc.codegen_pallas.phases import PhaseWriter

SEQUENCES = ["    batch=BATCH,", "    rows_per_sequence=ROWS_PER_SEQUENCE,"]


def round_lines(writer: PhaseWriter, phase: Phase) -> list[str]:
    """The body of the phase function, without its header."""
    writers: dict[type[Phase], Callable[[PhaseWriter, Any], list[str]]] = {
        AcceptPhase: _accept,
        CutDraftsPhase: _cut_drafts,
        KeptDeltaRulePhase: _kept_delta_rule,
        MarkovWalkPhase: _markov_walk,
        RowsAttentionPhase: _rows_attention,
        ScalarPhase: _scalar,
        SelectorWalkPhase: _selector_walk,
        TapPhase: _tap,
        TopKPhase: _top_k,
    }
    return writers[type(phase)](writer, phase)


def _kept_delta_rule(writer: PhaseWriter, phase: KeptDeltaRulePhase) -> list[str]:
    streams = (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay)
    cursors = ", ".join(f"{name}=cursors[{place}]" for place, name in enumerate(streams))
    function = "kept_channel_delta_rule" if phase.channels else "kept_delta_rule"
    return [
        f"cursors = support.{function}(",
        *[line for name in streams for line in (f"    m.{name},", f"    c.{name},")],
        f"    m.{phase.positions},",
        f"    m.{phase.kept},",
        f"    q={writer.view(phase.q)},",
        f"    k={writer.view(phase.k)},",
        f"    v={writer.view(phase.v)},",
        f"    beta={writer.view(phase.beta)},",
        f"    decay={writer.view(phase.decay)},",
        f"    out={writer.view(phase.output)},",
        *SEQUENCES,
        f"    key_heads={phase.key_heads},",
        f"    value_heads={phase.value_heads},",
        f"    key_dim={phase.key_dim},",
        f"    value_dim={phase.value_dim},",
        *([] if phase.rounds else ["    rounds=False,"]),
        ")",
        f"return c._replace({cursors})",
    ]


def _rows_attention(writer: PhaseWriter, phase: RowsAttentionPhase) -> list[str]:
    remembered = "None"
    if phase.remembered is not None:
        remembered = (
            f"({writer.view(phase.remembered.k)}, {writer.view(phase.remembered.v)}, "
            f"m.{phase.remembered.positions})"
        )
    return [
        "cursor = support.rows_attention(",
        f"    m.{phase.cache},",
        f"    c.{phase.cache},",
        f"    m.{phase.first},",
        f"    q={writer.view(phase.q)},",
        f"    k={writer.view(phase.k)},",
        f"    v={writer.view(phase.v)},",
        f"    positions=m.{phase.positions},",
        f"    remembered={remembered},",
        f"    out={writer.view(phase.output)},",
        f"    heads={phase.heads},",
        f"    kv_heads={phase.kv_heads},",
        f"    head_dim={phase.head_dim},",
        f"    scale={phase.scale!r},",
        f"    causal={phase.causal},",
        f"    window={phase.window},",
        *(["    anchored=True,"] if phase.anchored else []),
        *SEQUENCES,
        ")",
        f"return c._replace({phase.cache}=cursor)",
    ]


def _tap(writer: PhaseWriter, phase: TapPhase) -> list[str]:
    count = phase.counter
    return [
        f"shown = {writer.load(phase.source)}",
        f"support.store_tap(shown, m.{phase.buffer}, c.{count}, {phase.places})",
        f"return c._replace({count}=c.{count} + 1)",
    ]


def _top_k(writer: PhaseWriter, phase: TopKPhase) -> list[str]:
    lines = [
        f"values, ids = support.local_top_k({writer.view(phase.logits)}, {phase.k}, "
        f"{phase.columns})"
    ]
    if phase.exchange:
        lines += [
            "values, ids = support.sharded_top_k(",
            "    values,",
            "    ids,",
            f"    k={phase.k},",
            *writer.exchange_arguments(phase.exchange),
            f"    columns_per_rank={phase.columns},",
            ")",
        ]
    return [
        *lines,
        writer.store(phase.values, f"values[:, 0:{phase.k}]"),
        writer.store(phase.ids, f"ids[:, 0:{phase.k}]"),
        *writer.meeting(phase.meets),
        "return c",
    ]


def _accept(writer: PhaseWriter, phase: AcceptPhase) -> list[str]:
    if phase.sampling is not None:
        return _sampled_accept(writer, phase, phase.sampling)
    return [
        *writer.masking(phase.logits, phase.masks),
        *writer.best(phase.logits, phase.columns, phase.exchange),
        "support.accept_greedy(",
        "    index,",
        f"    tokens=m.{phase.tokens},",
        f"    positions=m.{phase.positions},",
        f"    emitted=m.{phase.emitted},",
        f"    count=m.{phase.count},",
        f"    last=m.{phase.last},",
        *SEQUENCES,
        ")",
        *writer.meeting(phase.meets),
        "return c",
    ]


def _sampled_accept(writer: PhaseWriter, phase: AcceptPhase, sampling: SampledAccept) -> list[str]:
    proposal = ["    proposal=None,"]
    if sampling.proposal:
        views = (
            f"support.View(ref=m.{name}, start=0, width={sampling.k})"
            for name in (sampling.candidates, sampling.proposal)
        )
        proposal = ["    proposal=(", *[f"        {one}," for one in views], "    ),"]
    options = ("temperature", "top_k", "top_p", "min_p", "seed")
    return [
        *writer.masking(phase.logits, phase.masks),
        f"values, ids = support.local_top_k({writer.view(phase.logits)}, {sampling.listed}, "
        f"{phase.columns})",
        "support.accept_sampled(",
        f"    {writer.view(phase.logits)},",
        "    values,",
        "    ids,",
        f"    listed={sampling.listed},",
        f"    columns={phase.columns},",
        "    ranks=RANKS,",
        "    sampling=support.Sampling(",
        *[f"        {name}=m.{getattr(sampling, name)}," for name in options],
        "    ),",
        *proposal,
        *_exchange("first", phase.exchange),
        *_exchange("second", sampling.race),
        f"    tokens=m.{phase.tokens},",
        f"    positions=m.{phase.positions},",
        f"    forced=m.{sampling.forced},",
        f"    emitted=m.{phase.emitted},",
        f"    count=m.{phase.count},",
        f"    last=m.{phase.last},",
        *SEQUENCES,
        ")",
        *writer.meeting(phase.meets),
        "return c",
    ]


def _exchange(name: str, exchange: str | None) -> list[str]:
    if exchange is None:
        return [f"    {name}=None,"]
    return _exchange_lines("    ", f"{name}=", exchange)


def _exchange_lines(indent: str, start: str, exchange: str) -> list[str]:
    """The buffers of an exchange, as an argument."""
    return [
        f"{indent}{start}support.Exchange(",
        f"{indent}    send=m.{exchange}_send,",
        f"{indent}    receive=m.{exchange}_receive,",
        f"{indent}    send_sem=m.{exchange}_sems.at[0],",
        f"{indent}    receive_sem=m.{exchange}_sems.at[1],",
        f"{indent}),",
    ]


def _selector_walk(writer: PhaseWriter, phase: SelectorWalkPhase) -> list[str]:
    scratch = walk_scratch(phase.k, phase.rank, writer.program.batch, writer.program.padded_rows)
    draws = phase.sampling
    drawn = []
    if draws is not None:
        drawn = [
            f"    proposal={writer.view(draws.proposal)},",
            f"    temperature=m.{draws.temperature},",
            f"    seed=m.{draws.seed},",
            f"    positions=m.{draws.positions},",
        ]
    return [
        f"support.{'selector_walk' if draws is None else 'sampled_walk'}(",
        f"    {writer.view(phase.values)},",
        f"    {writer.view(phase.ids)},",
        f"    {writer.view(phase.hidden)},",
        f"    predecessor=m.{phase.predecessor},",
        f"    successor=m.{phase.successor},",
        *[f"    {one.name}=m.{phase.id}_{one.name}," for one in scratch],
        f"    tokens=m.{phase.tokens},",
        f"    out=m.{phase.output},",
        *drawn,
        *SEQUENCES,
        f"    k={phase.k},",
        ")",
        "return c",
    ]


def _markov_walk(writer: PhaseWriter, phase: MarkovWalkPhase) -> list[str]:
    scratch = markov_scratch(phase.rank, phase.logits.width, writer.program.batch)
    lines, judge = [], "None"
    if phase.confidence is not None:
        page = f"m.{phase.page}.ring, c.{phase.page}.slot"
        rows = {one.param: one for one in writer.program.pages[phase.page]}
        for name, key in (("head", phase.head), ("bias", phase.bias)):
            lines.append(f"{name} = support.vector({page}, {rows[key].row}, {rows[key].length})")
        judge = f"({writer.view(phase.confidence)}, head, bias)"
    return [
        *lines,
        "support.markov_walk(",
        f"    {writer.view(phase.logits)},",
        f"    {writer.view(phase.hidden)},",
        f"    judge={judge},",
        f"    predecessor=m.{phase.predecessor},",
        f"    successor=m.{phase.successor}.ring.at[c.{phase.successor}.slot],",
        *[f"    {one.name}=m.{phase.id}_{one.name}," for one in scratch],
        "    exchanges=(",
        *[line for name in phase.exchanges for line in _exchange_lines("        ", "", name)],
        "    ),",
        f"    tokens=m.{phase.tokens},",
        f"    out=m.{phase.output},",
        *SEQUENCES,
        "    ranks=RANKS,",
        f"    rounds={phase.rounds},",
        ")",
        "return c",
    ]


def _cut_drafts(writer: PhaseWriter, phase: CutDraftsPhase) -> list[str]:
    return [
        "support.cut_drafts(",
        f"    m.{phase.positions},",
        f"    {writer.view(phase.confidence)},",
        f"    m.{phase.output},",
        f"    threshold={phase.threshold!r},",
        *SEQUENCES,
        ")",
        "return c",
    ]


def _scalar(writer: PhaseWriter, phase: ScalarPhase) -> list[str]:
    lines = []
    for node in phase.nodes:
        out = phase.scalars[node.results[0].name]
        first, second = (phase.scalars[name] for name in node.operands)
        match node.op:
            case ops_spec.KeptPositions():
                arguments = [f"m.{first}", f"m.{second}", f"m.{out}"]
            case ops_spec.NextPositions() as op:
                arguments = [f"m.{first}", f"m.{second}", f"m.{out}", f"context={op.context}"]
            case ops_spec.BlockTokens() as op:
                arguments = [f"m.{first}", f"m.{out}", f"mask={op.mask}"]
            case _:
                raise AssertionError(f"{node.op.mnemonic} is no arithmetic of scalars")
        arguments += ["batch=BATCH", "rows_per_sequence=ROWS_PER_SEQUENCE"]
        lines.append(f"support.{node.op.mnemonic}({', '.join(arguments)})")
    return [*lines, "return c"]
