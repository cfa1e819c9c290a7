"""The server as a process: how it starts, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from re import search
from typing import Any

import httpx
import numpy as np
import pytest

from mkc.cli.serve import names_of
from mkc.errors import BootCheckError
from mkc.runtime.backends import Launch
from serve.boot import boot_check
from serve.boot import warm_up
from serve.engine import State
from serve.metrics import Metrics
from serve.process import CRASHED
from serve.process import Place
from serve.process import run
from serve.settings import Settings
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import SECONDS
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running
from tests.serve.running import until
from tests.serve.test_serving_engine import Steps

BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


@contextmanager
def in_thread(folder: Path, backend: FakeBackend, place: Place, status: list[int]) -> Iterator[str]:
    """`run` in a thread; gives the URL, and puts the exit status into `status`."""
    said: list[str] = []

    def banner(model: object, url: str) -> str:
        said.append(url)
        return ""

    def serve() -> None:
        model = fake_model(folder, backend)
        options: dict[str, Any] = {"queue_size": 9, "rounds": 1, "banner": banner}
        status.append(run(opening(model), Settings(), place, **options))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    until(lambda: bool(said))
    yield said[0]
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_sigterm_finishes_what_runs_and_refuses_the_rest(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with running(opening(fake_model(checkpoint, backend))) as server:
        backend.free.clear()
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=BODY | {"stream": True}, timeout=SECONDS
        ) as answer:
            assert backend.waiting.wait(SECONDS)
            server.http.handle_exit(signal.SIGTERM, None)
            until(lambda: server.engine.state is State.DRAINING)
            for path, body in (("/v1/completions", BODY), ("/health", None)):
                refused = server.ask(path, body)
                assert refused.status_code == 503
                assert "draining" in refused.text
            backend.free.set()
            lines = [line for line in answer.iter_lines() if line]
        assert '"finish_reason":"length"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert server.engine.join(SECONDS)


def test_requests_are_taken_once_the_banner_is_printed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Metrics):
        def serve(self, *arguments: Any, **options: Any) -> None:
            time.sleep(0.3)
            super().serve(*arguments, **options)

    monkeypatch.setattr("serve.process.Metrics", Late)  # between opening and being ready
    backend, status = Steps(batch=1, context=128), list[int]()
    with in_thread(checkpoint, backend, Place(port=0), status) as url:
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        backend.broken = True
        for _ in range(2):
            until(lambda: httpx.get(f"{url}/health").status_code == 200)
            httpx.post(f"{url}/v1/completions", json=BODY)


def test_the_second_crash_ends_the_process(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    status: list[int] = []
    with in_thread(checkpoint, backend, Place(port=0), status) as url:
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        backend.broken = True
        for _ in range(2):
            until(lambda: httpx.get(f"{url}/health").status_code == 200)
            answer = httpx.post(f"{url}/v1/completions", json=BODY)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "E386"
    assert status == [CRASHED]


def test_a_unix_socket_is_for_its_user_only(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    backend, status = Steps(batch=1, context=128), list[int]()
    with in_thread(checkpoint, backend, Place(uds=path), status) as url:
        assert url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=BODY).status_code == 200
            backend.broken = True
            for _ in range(2):
                until(lambda: client.get("/health").status_code == 200)
                client.post("/v1/completions", json=BODY)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_tls(checkpoint: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *subject, *files], check=True, capture_output=True)
    place = Place(port=0, key_file=key, certificate=certificate)
    backend, status = Steps(batch=1, context=128), list[int]()
    with in_thread(checkpoint, backend, place, status) as url:
        assert url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate))) as client:
            assert client.post(f"{url}/v1/completions", json=BODY).status_code == 200
            backend.broken = True
            for _ in range(2):
                until(lambda: client.get(f"{url}/health").status_code == 200)
                client.post(f"{url}/v1/completions", json=BODY)


class Liar(FakeBackend):
    """Drafts, and emits other tokens with drafts than without.

    Attributes:
      honest: it does not.
    """

    drafts = 1
    draws = False
    honest = False

    def speculate(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        stop_ids: Sequence[Sequence[int]] = (),
        **options: Any,
    ) -> Launch:
        emitted = self.greedy_rounds(
            tokens, positions, active, rounds=[1] * self.batch, stop_ids=stop_ids
        )
        wrong = 0 if self.honest else int(len(self.slots[0]) % 16 == 0)
        return Launch(
            tokens=((emitted + wrong) % self.vocab)[:, :, None],
            counts=np.asarray([active], np.int32),
            drafts=np.zeros((1, self.batch), np.int32),
        )

    def next_drafts(self, slot: int, token: int, position: int) -> list[int]:
        return []


def test_the_boot_check_finds_drafts_that_change_the_output(checkpoint: Path) -> None:
    model = fake_model(checkpoint, Liar(context=128), scheme="block")
    with pytest.raises(BootCheckError, match=r"token \d+ of 32 is another one.* leads by inf"):
        boot_check(model, backend="reference", scheme="block")
    Liar.honest = True
    try:
        assert "with and without" in boot_check(model, backend="reference", scheme="block")
    finally:
        Liar.honest = False


@pytest.mark.parametrize(("lead", "passes"), [(0.0625, True), (0.125, False)])
def test_the_boot_check_lets_a_tie_go_either_way(
    checkpoint: Path, lead: float, passes: bool
) -> None:
    """Between 8 and 16 the last place of bf16 is worth 1/16."""
    row = np.zeros(420, np.float32)
    row[40], row[41] = 8.0, 8.0 - lead  # the liar takes the next token
    model = fake_model(checkpoint, Liar(context=128, logits=lambda history: row), scheme="block")
    if passes:
        assert "passed" in boot_check(model, backend="reference", scheme=None)
        assert model.backend.state(0)["tokens"].size == 0
    else:
        with pytest.raises(BootCheckError, match=f"leads by {lead}"):
            boot_check(model, backend="reference", scheme=None)


def test_warming_up_leaves_nothing_behind(checkpoint: Path) -> None:
    backend = FakeBackend(batch=2, context=64, rounds=4)
    model = fake_model(checkpoint, backend)
    warm_up(model)
    assert backend.slots == [[], []]
    assert {1, 2} <= set(backend.launches), "loops of rounds are programs of their own"
    assert model.prefix_cache is not None
    assert len(model.prefix_cache) == 0


def test_names(tmp_path: Path) -> None:
    assert names_of(None, None) == ["tiny"]
    assert names_of(None, str(tmp_path)) == [tmp_path.name]
    assert names_of(None, "owner/name") == ["owner/name"]
    assert names_of(["a", "b"], "owner/name") == ["a", "b"]


def test_the_command(tmp_path: Path) -> None:
    """Loading, boot check, banner, an answer, SIGTERM: the whole way with the small model."""
    options = "--port 0 --context 256 --rows 4 --boot-check --api-key me=secret"
    process = subprocess.Popen(
        [sys.executable, "-m", "mkc.cli.main", "serve", *options.split()],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MKC_API_KEYS": "other"},
    )
    assert process.stderr is not None
    try:
        lines: list[str] = []
        while not (lines and search(r"cache", lines[-1])):
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
        text = "".join(lines)
        passed = search(r"boot check passed: (\d+) tokens", text)
        assert passed is not None
        assert int(passed[1]) > 32  # more than one output, if not to its end
        assert "secret" not in text
        found = search(r"serving +(http://127\.0\.0\.1:\d+/v1)\n", text)
        assert found is not None
        for label in ("model", "backend", "scheme", "kernel"):
            assert search(rf"\n  {label} +\S", text)
        until(lambda: httpx.get(found[1].removesuffix("/v1") + "/health").status_code == 200)
        body = {"messages": [{"role": "user", "content": "What is 12 + 7?"}]}
        for key, status in (("secret", 200), ("other", 200), ("wrong", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(
                f"{found[1]}/chat/completions", json=body, headers=headers, timeout=SECONDS
            )
            assert answer.status_code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.stderr.close()
