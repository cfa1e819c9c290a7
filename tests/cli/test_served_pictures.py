"""Pictures of a kernel that runs, for the page of a server."""

from __future__ import annotations

from mkc.cli.kernel_choice import KernelChoice
from mkc.cli.served_pictures import pictures_of
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.rounds_backends import TINY
from tests.runtime.rounds_backends import emulated

CHOICE = KernelChoice(name="interpret", target="tpu7x", tp=1, packed=None, say=lambda line: None)


def test_a_running_kernel_is_drawn_from_its_own_program() -> None:
    backend = emulated(TINY, ranks=1, batch=1)
    pictures = pictures_of(backend, CHOICE)
    assert pictures is not None
    drawn = pictures.draw()
    assert tuple(drawn) == pictures.names
    name = backend.session.program.name
    for html in drawn.values():
        text = html.decode()
        assert f"<h1>{name}: " in text
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    assert pictures.draw() is drawn


def test_without_a_kernel_there_are_none() -> None:
    assert pictures_of(FakeBackend(), CHOICE) is None
    assert pictures_of(emulated(TINY, ranks=1, batch=1), None) is None
