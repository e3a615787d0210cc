"""The executor of a GPU, interpreted: a request that comes with tokens of its answer gets the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cuda_engines import greedy, interpreted
from driving import run_to_end

from loraplex.core.continuation import continued
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.core import Engine


@pytest.fixture(scope="module")
def core() -> Iterator[Engine]:
    engine = interpreted()
    yield engine
    engine.close()


def run(core: Engine, request: EngineRequest) -> list[int]:
    core.add_request(request)
    return run_to_end(core)[request.request_id].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": -4, "top_p": 0.9, "top_k": 40},
        {"seed": 5, "frequency_penalty": 2.0, "logprobs": 1},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(128))},
    ],
    ids=["greedy", "drawn on the device", "chosen by the host", "min_tokens"],
)
@pytest.mark.slow
def test_the_rest_is_the_same_wherever_it_was_cut(core: Engine, params: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
    request = replace(greedy("gpu", prompt=9), params=sampling)
    whole = run(core, request)
    assert len(whole) >= 3
    for cut in range(1, len(whole)):
        assert run(core, continued(request, tuple(whole[:cut]))) == whole[cut:]
