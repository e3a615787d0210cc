"""The share of the machine that each replica on it gets."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.engine.options import EngineOptions
from loraplex.server.fleet.local_replicas import with_share


@pytest.mark.parametrize(
    ("options", "num_cores", "on_gpu", "share"),
    [
        ({}, 32, True, {"max_cpu_workers": 16}),
        ({}, 8, True, {"max_cpu_workers": 4}),
        ({}, 2, True, {"max_cpu_workers": 0}),
        ({"cpu_workers": 5}, 2, True, {"cpu_workers": 5, "max_cpu_workers": 0}),
        ({}, 8, False, {"num_threads": 8}),
        ({}, 0, False, {"num_threads": 1}),
        ({"num_threads": 3}, 8, False, {"num_threads": 3}),
    ],
)
def test_a_replica_gets_its_share_of_the_machine(
    options: dict[str, Any], num_cores: int, on_gpu: bool, share: dict[str, Any]
) -> None:
    engine = EngineOptions(model="m", **options)
    found = with_share(engine, 4, 4 * num_cores, on_gpu=on_gpu)
    assert found == EngineOptions(model="m", memory_share=0.25, **share)
