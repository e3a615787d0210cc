"""Converts a GGUF file to a folder that `from_pretrained` and the engine can load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def convert_gguf(
    gguf_path: Path,
    folder: Path,
    *,
    on_tensor: Callable[[int, int], None] = lambda num_done, num_tensors: None,
) -> None:
    """Fill `folder` (which must exist) with config, weights in float16, tokenizer and chat template.

    `on_tensor(num_done, num_tensors)` is called after every tensor.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    from loraplex.demo.gguf_tokenizer import write_tokenizer
    from loraplex.demo.gguf_weights import llama_config, llama_weights

    reader = GGUFReader(str(gguf_path))
    config = llama_config(reader)
    num_tensors = len(reader.tensors)
    num_done = 0

    def count(_name: str) -> None:
        nonlocal num_done
        num_done += 1
        on_tensor(num_done, num_tensors)

    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(reader, folder)
    weights = llama_weights(reader, config, count)
    weights_path = folder / "model.safetensors"
    save_file(weights, str(weights_path), metadata={"format": "pt"})
    # safetensors makes its file private to the user; give it the same mode as the others, as caches may be
    # shared.
    weights_path.chmod((folder / "config.json").stat().st_mode)


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
