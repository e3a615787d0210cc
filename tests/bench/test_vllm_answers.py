"""The script that holds our idea of vLLM against a real one, tried on the server that stands in for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_checkpoint import Checkpoint
from benchmarks.vllm_answers import compare_shapes, load_stand_in, missing, shape_of


def differences(tmp_path: Path, **behaviour: Any) -> dict[str, list[str]]:
    """Compare the stand-in with another one that behaves so."""
    folder = tmp_path / "adapters" / "lora-0000"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    dialect = load_stand_in()

    async def scenario() -> dict[str, list[str]]:
        async with dialect.VllmDialect(dialect.Behaviour(base_model="base", **behaviour)) as server:
            found = await compare_shapes(server.url, Checkpoint(root=tmp_path, num_adapters=1))
        return {each["check"]: each["differences"] for each in found if not each["passed"]}

    return asyncio.run(scenario())


def test_a_server_that_answers_alike_passes_every_check(tmp_path: Path) -> None:
    assert differences(tmp_path) == {}


def test_other_statuses_and_fields_are_named(tmp_path: Path) -> None:
    found = differences(tmp_path, knows_token_ids=False, max_lora_rank=4)
    assert found["completion"] == [".choices[].token_ids is absent"]
    assert found["load"][0] == "HTTP 500, not 200"
    assert "stream of an adapter" in found


@pytest.mark.parametrize(
    ("wanted", "found", "differences"),
    [
        ({"a": 1}, {"a": 2.5, "b": 3}, []),
        ({"a": [{"b": "x"}]}, {"a": [{"b": None}, {"b": "y"}]}, []),
        ({"a": 1}, {"a": "1"}, [".a is 'str', not 'number'"]),
        ({"a": {"b": 1}}, {"a": {}}, [".a.b is absent"]),
        ({"a": 1}, "text", ["the body is 'str', not {'a': 'number'}"]),
        ({"top_logprobs": [{"x": 1}]}, {"top_logprobs": [{"y": 1}]}, []),
    ],
)
def test_shapes(wanted: Any, found: Any, differences: list[str]) -> None:
    assert missing(shape_of(wanted), shape_of(found)) == differences
