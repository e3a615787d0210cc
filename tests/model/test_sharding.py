"""A model in shards: the logits of the whole, in every process, to the last bit the same."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import shard_logits
import torch
from tiny import FAMILIES, save_model

from loraplex.core.errors import ModelError
from loraplex.model.collective import connect
from loraplex.model.config import load_config
from loraplex.model.shapes import config_of_shape
from loraplex.model.sharding import Shard

VOCAB_SIZE = 251
"""Not even: the last shard's part of the vocabulary is padded."""


def test_a_part_tells_the_whole_that_it_is_of() -> None:
    config = config_of_shape("llama-3-8b")
    shard = Shard(index=1, count=4)
    assert shard.whole(shard.config(config).shape) == config.shape


def test_two_processes_compute_the_logits_of_every_family(tmp_path: Path) -> None:
    folders = [tmp_path / family for family in FAMILIES]
    for folder in folders:
        save_model(folder, folder.name, vocab_size=VOCAB_SIZE)
    rendezvous, theirs = tmp_path / "rendezvous", tmp_path / "theirs"
    program = [sys.executable, shard_logits.__file__, str(rendezvous), str(theirs), *map(str, folders)]
    with subprocess.Popen(program) as process:
        ours = shard_logits.logits_of_all(folders, Shard(index=0, count=2), rendezvous)
        assert process.wait(60) == 0
    others = torch.load(theirs)
    kinds = [(folder, dtype) for folder in folders for dtype in shard_logits.DTYPES]
    for (folder, dtype), found, other in zip(kinds, ours, others, strict=True):
        assert torch.equal(found, other), f"{folder.name}: the processes differ"
        whole = shard_logits.logits(folder, dtype)
        assert found.shape == whole.shape == (len(shard_logits.PROMPT), VOCAB_SIZE)
        exact = shard_logits.logits(folder, torch.float32)
        error = (found.float() - exact).norm() / exact.norm()
        rounding = (whole.float() - exact).norm() / exact.norm()
        assert error < max(1.5 * rounding, 1e-5), folder.name


@pytest.mark.parametrize("num_columns", [5, 8])
def test_columns_are_gathered_in_order_and_padding_is_cut(tmp_path: Path, num_columns: int) -> None:
    whole_LV = torch.arange(3 * num_columns, dtype=torch.float32).view(3, num_columns)

    def gather(index: int) -> torch.Tensor:
        shard = Shard(index=index, count=4)
        collective = connect(shard, tmp_path / "rendezvous", torch.device("cpu"))
        part_LV = shard.vocabulary(whole_LV.t()).t()
        assert collective.gather_columns(part_LV[:0], num_columns).shape == (0, num_columns)
        return collective.gather_columns(part_LV, num_columns)

    with ThreadPoolExecutor(4) as threads:
        assert all(torch.equal(gathered, whole_LV) for gathered in threads.map(gather, range(4)))


def test_a_shard_has_its_share_of_heads_and_mlp(tmp_path: Path) -> None:
    save_model(tmp_path)
    whole = load_config(tmp_path).shape
    part = Shard(index=1, count=2).config(load_config(tmp_path)).shape
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 48)
    assert (part.hidden_size, part.head_dim, part.vocab_size) == (whole.hidden_size, 16, whole.vocab_size)
    assert 2 * part.linear_flops == whole.linear_flops


@pytest.mark.parametrize(
    ("shape", "count", "words"),
    [
        ("qwen2.5-7b", 8, "28 attention heads, 4 KV heads and an MLP of 18944; .* can be 1, 2 or 4"),
        ("llama-2-7b", 3, "can be 1, 2, 4, 8, 16 or 32"),
    ],
)
def test_parts_that_are_not_equal_are_refused_with_the_counts_that_are(
    shape: str, count: int, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        Shard(index=0, count=count).config(config_of_shape(shape))
