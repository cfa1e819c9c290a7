"""Two checkpoints, one tape: the weights of a kernel that drafts."""

from __future__ import annotations

import json
from json import loads
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mkc.driver import lower_graph
from mkc.errors import CheckpointMismatchError
from mkc.errors import PackedMismatchError
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.layout import pack_layout
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.manifest import drafter_identity
from mkc.runtime.pair import check_pair
from mkc.runtime.pair import paired
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import block_round
from mkc.targets import load_target
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.packed import check_operands
from tests.runtime.packed import digests
from tests.runtime.rounds_backends import DRAFTS
from tests.runtime.rounds_backends import MINI
from tests.runtime.rounds_backends import TARGET
from tests.runtime.rounds_backends import lowered_round
from tests.runtime.rounds_backends import scheme_of
from tests.runtime.rounds_backends import tensors_of

RANKS = 2
MODELS = Path(__file__).parents[2] / "models"
IDENTITY = drafter_identity("dflash2", DRAFTS[MINI])

type Pair = tuple[Checkpoint, Checkpoint]


def write_draft(folder: Path, **changes: Any) -> Checkpoint:
    """The drafter's folder; `changes` are tensors of it."""
    tensors = {
        name.removeprefix(DRAFT_NAMESPACE): np.ascontiguousarray(one)
        for name, one in tensors_of(MINI).items()
        if name.startswith(DRAFT_NAMESPACE)
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(DRAFTS[MINI]))
    save_file(tensors | changes, folder / SINGLE)
    return Checkpoint.open(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return Checkpoint.open(write_checkpoint(folder / "target", MINI)), write_draft(folder / "draft")


@pytest.fixture(scope="module")
def packed(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "out"
    pack(paired(*pair), lowered_round(MINI, ranks=RANKS, batch=1), folder, drafter=IDENTITY)
    return folder


def test_every_operand_is_packed(packed: Path) -> None:
    """The LM head of each use, the codebooks as tables, base kernels in the pages."""
    plan = lowered_round(MINI, ranks=RANKS, batch=1)
    check_operands(packed, plan, tensors_of(MINI), IDENTITY)
    load_packed(packed, plan, IDENTITY).verify()
    heads = [one for one in pack_layout(plan).lines if "lm_head.weight" in one]
    assert len(heads) == 2
    tables = [one for one in pack_layout(plan).lines if one.startswith("table")]
    assert len(tables) == 3, "the embedding, looked up twice, and two codebooks"
    base = [one for one in pack_layout(plan).lines if "base_kernel" in one]
    assert len(base) == 2 * 2 * 2, "convolutions, sides, taps"


def test_one_folder_serves_every_batch(packed: Path) -> None:
    """Also rounds that sample."""
    load_packed(packed, lowered_round(MINI, ranks=RANKS, batch=2), IDENTITY).verify()
    load_packed(packed, lowered_round(MINI, ranks=RANKS, batch=1, sampling=True), IDENTITY)


def test_the_full_size_is_packed_alike_for_every_batch() -> None:
    """Whether a projection is divided and gathered must not depend on the sequences at once."""
    config, draft = (loads((MODELS / one.default_config).read_text()) for one in (MODEL, DRAFTER))
    lines = []
    for batch, context in ((1, 256), (4, 4096)):
        scheme = block_round(
            MODEL, config, DRAFTER, draft, batch=batch, context=context, sampling=False
        )
        lowered = lower_graph(scheme.graph, load_target(TARGET), tp=8)
        assert lowered.steps.sharded.gathered, "nothing is decided here"
        lines.append(pack_layout(lowered).lines)
    assert lines[0] == lines[1]


def test_a_killed_packing_continues(pair: Pair, packed: Path, tmp_path: Path) -> None:
    """As for one checkpoint: the finished folder is the same, byte for byte."""
    plan = lowered_round(MINI, ranks=RANKS, batch=1)
    done = 0

    class KilledError(Exception):
        """What ends the first packing."""

    def kill(count: int) -> None:
        nonlocal done
        done += count
        if done > pack_layout(plan).bytes // 2:
            raise KilledError

    with pytest.raises(KilledError):
        pack(paired(*pair), plan, tmp_path / "out", drafter=IDENTITY, progress=kill)
    assert (tmp_path / "out" / JOURNAL).exists()
    result = pack(paired(*pair), plan, tmp_path / "out", drafter=IDENTITY)
    assert 0 < result.continued_bytes < result.bytes
    assert digests(tmp_path / "out") == digests(packed)


def test_the_manifest_names_both(pair: Pair, packed: Path) -> None:
    manifest = json.loads((packed / MANIFEST).read_text())
    assert manifest["drafter"] == list(IDENTITY)
    assert "dflash_config.mask_token_id = 1014" in manifest["drafter"]
    digest = [one.headers[0].digest for one in pair]
    assert [one["header_sha256"] for one in manifest["sources"]] == digest


def test_another_drafter_is_refused(pair: Pair, packed: Path) -> None:
    """The first difference of the config is shown, though the weights have the same form."""
    config = DRAFTS[MINI] | {"sliding_window": 16}
    plan = lowered_round(MINI, ranks=RANKS, batch=1)
    said = "of 'drafter' is 'sliding_window = 32'; expected 'sliding_window = 16'"
    with pytest.raises(PackedMismatchError, match=said):
        load_packed(packed, plan, drafter_identity("dflash2", config))
    with pytest.raises(PackedMismatchError, match=said):
        pack(paired(*pair), plan, packed, drafter=drafter_identity("dflash2", config))


def test_other_weights_of_the_drafter_are_refused(pair: Pair, packed: Path, tmp_path: Path) -> None:
    other = write_draft(tmp_path / "draft", extra=np.zeros(3, np.float32))
    plan = lowered_round(MINI, ranks=RANKS, batch=1)
    with pytest.raises(PackedMismatchError, match="entry 2 of 'sources'"):
        pack(paired(pair[0], other), plan, packed, drafter=IDENTITY)


def test_with_and_without_a_drafter_are_not_the_same(
    pair: Pair, packed: Path, tmp_path: Path
) -> None:
    with pytest.raises(PackedMismatchError, match="'drafter' is 'dflash2'; expected absent"):
        load_packed(packed, lowered(MINI, RANKS))
    pack(pair[0], lowered(MINI, RANKS), tmp_path / "out")
    plan = lowered_round(MINI, ranks=RANKS, batch=1)
    with pytest.raises(PackedMismatchError, match="'drafter' is absent; expected 'dflash2'"):
        load_packed(tmp_path / "out", plan, IDENTITY)


def test_what_does_not_fit_is_named_by_its_own_checkpoint(pair: Pair, tmp_path: Path) -> None:
    graph = scheme_of(MINI, batch=1).graph
    target, draft = pair
    report = check_pair(graph, target, draft)
    assert report.extra == ()
    with pytest.raises(CheckpointMismatchError, match=r"missing: fc\.weight"):
        check_pair(graph, target, target)
    extra = write_draft(tmp_path / "draft", lora=np.zeros(3, np.float32))
    assert check_pair(graph, target, extra).extra == ("draft.lora",)
    with pytest.raises(CheckpointMismatchError, match="extra: lora"):
        check_pair(graph, target, extra, strict=True)
