from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_openai import FakeServer, serving
from pictures import readable_pictures  # noqa: F401


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server
