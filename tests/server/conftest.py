from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fixtures import Api, Served, make_server


@pytest.fixture
def make_api(tmp_path: Path) -> Iterator[Callable[..., Api]]:
    """Yield a factory of servers that are called in this process; see `make_server` for the options."""
    apis: list[Api] = []

    def make(*args: Any, **options: Any) -> Api:
        apis.append(Api(make_server(tmp_path, *args, **options)))
        return apis[-1]

    yield make
    for api in apis:
        api.close()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api()


@pytest.fixture
def make_served(tmp_path: Path) -> Callable[..., Served]:
    """Return a factory of servers for `live`."""

    def make(*args: Any, **options: Any) -> Served:
        return make_server(tmp_path, *args, **options)

    return make
