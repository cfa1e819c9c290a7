"""Checkpoints: every form of folder, the hub's cache, and the list of everything that is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from ml_dtypes import bfloat16

from mkc.errors import CheckpointError
from mkc.errors import CheckpointMismatchError
from mkc.errors import SafetensorsError
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import INDEX
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from tests.goldens import golden_case
from tests.runtime.checkpoints import FORMS
from tests.runtime.checkpoints import Forms
from tests.runtime.checkpoints import write_checkpoint

MINI = "qwen38_mini"
NORM = "model.language_model.norm.weight"  # bf16[256]
HEAD = "lm_head.weight"
A_LOG = "model.language_model.layers.0.linear_attn.A_log"  # f32
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden case as a folder that no test changes."""
    return write_checkpoint(tmp_path_factory.mktemp("mini"), MINI)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_folder_gives_the_same_tensors(tmp_path: Path, form: str) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, MINI, form=form))
    expected = golden_case(MINI).weights()
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        found = checkpoint.load(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert found.tobytes() == tensor.tobytes()


def test_the_golden_checkpoint_is_what_its_graph_needs(mini: Path) -> None:
    report = Checkpoint.open(mini).check(golden_case(MINI).graph())
    assert report.extra == ()
    assert report.converted == ()


def test_only_the_tensor_that_is_asked_for_is_read(
    mini: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    checkpoint = Checkpoint.open(mini)
    assert read == []
    checkpoint.load(NORM)
    assert sum(read) == 256 * 2


def test_config_and_tokenizer_are_beside_the_weights(mini: Path) -> None:
    checkpoint = Checkpoint.open(mini)
    assert checkpoint.config == golden_case(MINI).meta["config"]
    assert [one.name for one in checkpoint.tokenizer_files] == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert checkpoint.revision == ""


def test_files_are_opened_again_after_closing(mini: Path) -> None:
    checkpoint = Checkpoint.open(mini)
    first = checkpoint.load(NORM)
    checkpoint.close()
    assert checkpoint.load(NORM).tobytes() == first.tobytes()


# Element types.


def test_tensors_may_be_stored_in_the_other_float_type(tmp_path: Path) -> None:
    """f32 in place of bf16 is rounded to nearest even, bf16 in place of f32 is exact."""
    stored: dict[str, Any] = dict(golden_case(MINI).weights())
    wide = np.linspace(-1.0, 1.0, 256, dtype=np.float32)
    wide[:2] = (1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8)  # halfway between two bf16
    stored[NORM] = wide
    stored[A_LOG] = stored[A_LOG].astype(bfloat16)
    graph = golden_case(MINI).graph()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, MINI, weights=stored))
    assert checkpoint.check(graph).converted == tuple(sorted([NORM, A_LOG]))
    load = checkpoint.loader(graph)
    assert load(NORM).dtype == bfloat16
    assert load(NORM)[:2].astype(np.float32).tolist() == [1.0, 1.0 + 2.0**-6]
    assert load(A_LOG).dtype == np.float32
    assert np.array_equal(load(A_LOG), stored[A_LOG].astype(np.float32))


# What does not fit the graph.


def test_every_difference_is_listed_at_once(tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(golden_case(MINI).weights())
    del stored[HEAD]
    del stored["model.language_model.layers.3.self_attn.q_norm.weight"]
    stored[NORM] = np.zeros(255, bfloat16)
    stored[A_LOG] = stored[A_LOG].astype(np.float16)
    table = "model.language_model.embed_tokens.weight"
    stored[table] = np.zeros((3, 4), np.int32)
    stored["model.visual.patch.weight"] = np.zeros(4, np.float32)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, MINI, weights=stored))
    graph = golden_case(MINI).graph()
    expected = [
        "missing: lm_head.weight, expected bf16[1024, 256]",
        "missing: model.language_model.layers.3.self_attn.q_norm.weight, expected bf16[",
        f"wrong shape: {NORM} is BF16[255], expected bf16[256]",
        f"wrong shape: {table} is I32[3, 4], expected bf16[1024, 256]",
        f"wrong type: {table} is I32[3, 4], expected bf16[1024, 256]",
        f"wrong type: {A_LOG} is F16[24], expected f32[24]",
    ]
    with pytest.raises(CheckpointMismatchError) as raised:
        checkpoint.check(graph)
    message = str(raised.value)
    assert f"all differences ({len(expected)})" in message
    assert len(message.splitlines()) == len(expected) + 2
    assert message.endswith("\n  not named by the model: model.visual.patch.weight")
    for line in expected:
        assert line in message
    with pytest.raises(CheckpointMismatchError, match="extra: model.visual.patch.weight"):
        checkpoint.check(graph, strict=True)


def test_tensors_of_other_parts_are_reported_and_left_alone(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": np.zeros(4, np.float32), "model.visual.w": np.zeros(4, np.uint8)}
    stored = {**golden_case(MINI).weights(), **extra}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, MINI, weights=stored))
    assert checkpoint.check(golden_case(MINI).graph()).extra == tuple(sorted(extra))


def test_an_index_may_name_a_tensor_that_its_file_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MINI, form=Forms.SHARDED)
    index = json.loads((tmp_path / INDEX).read_text())
    first, *others = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = next(
        one for one in (first, *others) if one != index["weight_map"][NORM]
    )
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointMismatchError, match=f"missing: {NORM}"):
        Checkpoint.open(tmp_path).check(golden_case(MINI).graph())


# Files that are broken.


def test_a_truncated_file_is_named_wherever_it_ends(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, MINI) / SINGLE
    size = path.stat().st_size
    for length in (size - 1, size // 2, 4000, 9, 8, 7, 0):
        os.truncate(path, length)
        with pytest.raises(SafetensorsError, match=f"{SINGLE}: is truncated"):
            Checkpoint.open(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, MINI) / SINGLE
    checkpoint = Checkpoint.open(tmp_path)
    os.truncate(path, checkpoint.tensors[HEAD].start + 100)
    with pytest.raises(SafetensorsError, match=f"ends inside tensor '{HEAD}'"):
        checkpoint.load(HEAD)


def header(document: object) -> bytes:
    """A file of nothing but a header and eight bytes."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def entry(**changes: object) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (header(b"{not json"), "header is not JSON"),
        (header([1]), "header is not a JSON object"),
        (header({"w": 3}), "entry of tensor 'w' cannot be read"),
        (header({"w": entry(data_offsets=[0])}), "entry of tensor 'w' cannot be read"),
        (header({"w": entry(shape=[3])}), r"'w' is F32\[3\] at bytes 0 to 8, which is not 12"),
        (header({"w": entry(data_offsets=[8, 0])}), "'w' is F32"),
        (header({"w": entry(shape=[-1, -2])}), "'w' is F32"),
        (header({"w": entry(data_offsets=[8, 16])}), "is truncated"),
        ((200_000_000).to_bytes(8, "little") + bytes(99), "is truncated or not safetensors"),
    ],
)
def test_a_broken_header_is_explained(tmp_path: Path, contents: bytes, said: str) -> None:
    (tmp_path / SINGLE).write_bytes(contents)
    with pytest.raises(SafetensorsError, match=said):
        Checkpoint.open(tmp_path)


# Folders that are no checkpoints.


def without_a_shard(folder: Path) -> None:
    next(folder.glob("*2-of*")).unlink()


def with_a_wrong_index(folder: Path) -> None:
    (folder / INDEX).write_text("[]")


def with_a_path_in_the_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"w": "../w.safetensors"}}')


def with_a_copy(folder: Path) -> None:
    (folder / INDEX).unlink()
    first = sorted(folder.glob("*.safetensors"))[0]
    (folder / "z.safetensors").write_bytes(first.read_bytes())


def pickled_only(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (without_a_shard, CheckpointError, "not there: model-00002-of-00003.safetensors"),
        (with_a_wrong_index, SafetensorsError, "is not an index"),
        (with_a_path_in_the_index, SafetensorsError, "no file beside it"),
        (with_a_copy, CheckpointError, "is in model-00001-of-00003.safetensors and z.safetensors"),
        (pickled_only, CheckpointError, "only pickled weights, which mkc never opens"),
    ],
)
def test_a_folder_that_is_incomplete_is_explained(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], said: str
) -> None:
    change(write_checkpoint(tmp_path, MINI, form=Forms.SHARDED))
    with pytest.raises(error, match=said):
        Checkpoint.open(tmp_path)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mini@main", MINI)
    assert Checkpoint.open(folder).folder == folder


def test_a_folder_has_no_revision(mini: Path) -> None:
    with pytest.raises(CheckpointError, match="is a folder, which has no revision 'main'"):
        Checkpoint.open(mini, revision="main")


# The hub, offline: its cache is laid out as its client does.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mini: Path) -> Path:
    """A cache with one checkpoint: one commit, to which `main` points, files as links to blobs."""
    repository = tmp_path / "models--owner--mini"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs").symlink_to(mini)
    for path in mini.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs", path.name))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("owner/mini", None),
        ("owner/mini", "main"),
        ("owner/mini", COMMIT),
        ("owner/mini@main", None),
        (f"owner/mini@{COMMIT}", None),
        ("owner/mini@main", "main"),
    ],
)
def test_a_hub_name_is_found_in_the_cache(hub: Path, name: str, revision: str | None) -> None:
    checkpoint = Checkpoint.open(name, revision=revision)
    assert checkpoint.folder == hub
    assert checkpoint.revision == COMMIT
    assert checkpoint.config == json.loads((hub / CONFIG).read_text())
    assert checkpoint.load(NORM).tobytes() == golden_case(MINI).weights()[NORM].tobytes()


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("owner/mini", "v2", "not in the hub's cache at revision 'v2'"),
        ("owner/mini", COMMIT[::-1], "not in the hub's cache at revision"),
        ("owner/mini@v2", None, "owner/mini: .*not in the hub's cache at revision 'v2'"),
        ("owner/mini@main", "v2", "owner/mini@main: has the revision 'v2' beside it"),
        ("owner/mini@", None, "owner/mini@: has no revision behind the @"),
        ("owner/other", None, "not in the hub's cache, and cannot be downloaded"),
        ("a folder/that is/not there", None, "neither a folder nor a name of the Hugging Face hub"),
    ],
)
def test_a_hub_name_that_is_not_in_the_cache_is_refused_offline(
    hub: Path, name: str, revision: str | None, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.open(name, revision=revision)
