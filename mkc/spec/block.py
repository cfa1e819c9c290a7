"""The scheme of block drafters: verify the last round's drafts, accept, draft the next block.

A round ends with the drafts for the next one. So what goes from round to round are tokens and what
they were drawn from, no activations; and a round without drafts, as after a prompt, is an ordinary
decode step whose other rows are padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mkc.errors import ContextError
from mkc.errors import DraftMismatchError
from mkc.ir.builder import Outputs
from mkc.ir.builder import Tensor
from mkc.ir.builder import Trace
from mkc.ir.builder import apply
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.draft import ContextStep
from mkc.ir.draft import DraftStep
from mkc.ir.ops import Embed
from mkc.ir.ops import Linear
from mkc.ir.ops_spec import KeptPositions
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.trace import TracedNode
from mkc.ir.trace import TracedParam
from mkc.ir.types import DType
from mkc.model import Drafter
from mkc.model import DraftForm
from mkc.model import Model
from mkc.spec.commit import commit_late
from mkc.spec.scheme import DRAFT_NAMESPACE
from mkc.spec.scheme import KEPT
from mkc.spec.scheme import SAMPLING
from mkc.spec.scheme import Round
from mkc.spec.scheme import accept_and_advance
from mkc.spec.scheme import sampling_inputs
from mkc.spec.scheme import step_of
from mkc.spec.scheme import without_unread
from mkc.spec.taps import connect


def block_round(
    target: Model,
    config: Mapping[str, Any],
    drafter: Drafter,
    draft_config: Mapping[str, Any],
    *,
    batch: int,
    context: int,
    sampling: bool = True,
) -> Round:
    """Up to as many tokens per round as the drafter's block has rows.

    Args:
      config, draft_config: contents of the config.json of each.
      sampling: tokens can be drawn; else rounds are greedy, and have no inputs for it.

    Raises:
      ConfigError: a config is not one of its model.
      DraftMismatchError: the drafter was made for another target.
      MkcError: one of the models builds no valid graph.
    """
    loaded, draft = target.load_config(config), drafter.load_config(draft_config)
    form = drafter.form(draft)
    if context > form.max_positions:
        raise ContextError(
            context=context,
            expected=f"at most the {form.max_positions} positions of drafter '{drafter.name}'",
            hint=f"Use --context {form.max_positions} or less",
        )

    def start(rows: int) -> Trace:
        name = f"{target.name}_{drafter.name}"
        return Trace(name=name, rows=rows * batch, batch=batch, context=context, taps=True)

    record = start(form.rows)
    inputs = dict(zip(SAMPLING, sampling_inputs(record), strict=True)) if sampling else {}
    record.new_input(KEPT, DType.I32, batch)
    proposal: tuple[Tensor, ...] = ()
    if sampling and form.candidates:
        proposal = (
            record.new_input("candidates", DType.I32, record.rows, form.candidates),
            record.new_input("proposal", DType.F32, record.rows, form.candidates),
        )
    with recording(record):
        outputs = target.decoder(loaded, step_of(record))
        table, head = _embedding(record), _head(record, outputs)
        _check(drafter.name, form, table, head)
        accepted = accept_and_advance(record, outputs, tuple(inputs.values()), *proposal)
        (verified,) = apply(KeptPositions(), record.inputs["positions"], accepted.count)
        step = DraftStep(
            rows=record.rows,
            batch=batch,
            remembered=_remembered(record, form, verified),
            anchor=accepted.last,
            positions=accepted.positions,
            sampling=(inputs["temperature"], inputs["seed"]) if sampling else (),
            table=table,
            head=head,
        )
        record.namespace = DRAFT_NAMESPACE
        drafts = drafter.propose(draft, step)
    results = {
        "emitted": accepted.emitted,
        "count": accepted.count,
        "logits": outputs.logits,
        "tokens": drafts.tokens,
        "positions": accepted.positions if drafts.positions is None else drafts.positions,
        KEPT: accepted.count,
    }
    carried: tuple[str, ...] = ("tokens", "positions", KEPT)
    if proposal:
        assert drafts.candidates is not None and drafts.proposal is not None, drafter.name
        results |= {"candidates": drafts.candidates, "proposal": drafts.proposal}
        carried = (*carried, "candidates", "proposal")
    graph = commit_late(build(record, results), kept=KEPT)
    graph = replace(graph, name=target.name, metadata={**graph.metadata, "scheme": drafter.name})

    record = start(1)
    with recording(record):
        outputs = target.decoder(loaded, step_of(record))
        remembered = _remembered(record, form, record.inputs["positions"])
        record.namespace = DRAFT_NAMESPACE
        drafter.remember(draft, remembered)
    results = {"next_token": outputs.next_token, "logits": outputs.logits}
    return Round(
        name=drafter.name,
        graph=without_unread(connect(graph, drafter=drafter.name)),
        prefill=connect(build(record, results), drafter=drafter.name),
        carried=carried,
    )


def _remembered(record: Trace, form: DraftForm, positions: Tensor) -> ContextStep:
    """The rows of the step as a drafter sees them."""
    op = ReadTaps(name=form.tap, layers=form.layers, width=form.hidden)
    (features,) = apply(op, record.inputs["positions"])
    return ContextStep(
        rows=record.rows,
        batch=record.batch,
        context=record.context,
        features=features,
        positions=positions,
    )


def _embedding(record: Trace) -> Tensor:
    """The table that the target looks its tokens up in."""
    tokens = record.inputs["tokens"].ref
    for node in _outer_nodes(record):
        if isinstance(node.op, Embed) and node.operands[0] == tokens:
            return _param(record, node.operands[1])
    raise DraftMismatchError(drafter=record.name, problem="the target looks no tokens up")


def _head(record: Trace, outputs: Outputs) -> Tensor:
    """The matrix that the target's logits come from."""
    for node in _outer_nodes(record):
        if isinstance(node.op, Linear) and outputs.logits.ref in node.results:
            return _param(record, node.operands[1])
    raise DraftMismatchError(
        drafter=record.name, problem="the target's logits are no product with an LM head"
    )


def _outer_nodes(record: Trace) -> Iterator[TracedNode]:
    """What was recorded outside of layers."""
    return (item for item in record.items if isinstance(item, TracedNode))


def _param(record: Trace, use: int | TracedParam) -> Tensor:
    assert isinstance(use, TracedParam), "a table that is computed"
    return Tensor(trace=record, ref=use, type_=use.type)


def _check(drafter: str, form: DraftForm, table: Tensor, head: Tensor) -> None:
    wanted = (form.vocab, form.hidden)
    for name, one in (("embedding", table), ("LM head", head)):
        if one.shape != wanted:
            raise DraftMismatchError(
                drafter=drafter,
                problem=f"it was made for an {name} of {wanted}, and that of the target is "
                f"{one.shape}",
            )
