from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from serving_fakes import hf_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, two adapters, and two more in another folder."""
    root = tmp_path_factory.mktemp("fleet")
    base = tiny.save_model(root, vocab_size=400, max_position_embeddings=1024)
    hf_tokenizer().save_pretrained(root)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(root / "adapters" / name, base, rank=4 * (seed + 1), seed=seed + 1)
    for seed, name in enumerate(("three", "cold")):
        tiny.save_adapter(root / "more" / name, base, rank=4, seed=9 + seed)
    return root
