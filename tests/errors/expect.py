"""`refused`: the one way in which the tests of this folder look at an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mkc.errors import MkcError


@contextmanager
def refused(error: type[MkcError], *fragments: str) -> Iterator[pytest.ExceptionInfo[MkcError]]:
    """The block raises exactly `error`, and its report holds every fragment.

    A good message has four things, and the fragments of a test should show them: what is wrong,
    where in the user's input, what was expected, what to do.
    """
    with pytest.raises(error) as raised:
        yield raised
    assert type(raised.value) is error
    report = raised.value.report()
    assert report.startswith(f"error[{error.code}]: ")
    for fragment in fragments:
        assert fragment in report, f"{fragment!r} is not in: {report}"
