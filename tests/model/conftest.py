"""Fixtures of the decoder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyserve._C import get_num_threads, set_num_threads


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """Whatever the test sets the number of threads to, the next one finds it as it was."""
    before = get_num_threads()
    yield
    set_num_threads(before)
