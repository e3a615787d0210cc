"""Weights that are read beside the rest of a start are those that would have been read alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import save_model

from loraplex.core.errors import ModelError
from loraplex.engine.cuda.weight_reading import WeightReading
from loraplex.model.config import load_config
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import load_weights

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


def begin(folder: Path, shard: Shard = WHOLE) -> WeightReading:
    return WeightReading(folder, load_config(folder), torch.bfloat16, CPU, shard)


@pytest.mark.parametrize("shard", [WHOLE, Shard(index=1, count=2)])
def test_weights_are_those_of_the_checkpoint(folder: Path, shard: Shard) -> None:
    said: list[float | None] = []
    read = begin(folder, shard).finish(lambda phase, fraction: said.append(fraction))
    expected = load_weights(folder, load_config(folder), torch.bfloat16, shard=shard)
    for ours, theirs in zip(read.layers, expected.layers, strict=True):
        for group, linear in theirs.linears.items():
            assert torch.equal(ours.linears[group], linear)
    assert torch.equal(read.lm_head_VH, expected.lm_head_VH)
    assert said == sorted(said)


def test_what_is_wrong_with_a_file_is_said_when_it_is_waited_for(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    reading = begin(folder)
    with pytest.raises(ModelError, match=r"truncated or corrupt.*Download it again"):
        reading.finish(lambda phase, fraction: None)
    reading.close()


def test_a_reading_that_nobody_waits_for_can_be_closed(folder: Path) -> None:
    reading = begin(folder)
    reading.close()
    reading.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        reading._copying.submit(print)
