"""Makes a Hugging Face tokenizer (byte-level BPE) from the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.demo.gguf_weights import metadata_value

if TYPE_CHECKING:
    from gguf import GGUFReader

_CONTROL_TOKEN_TYPE = 3  # gguf.TokenType.CONTROL: never produced by merging plain text


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json (with chat template) and special_tokens_map.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata_value(reader, "tokenizer.ggml.model") != "gpt2":
        raise ValueError("the GGUF file's tokenizer is not a byte-level BPE")
    if metadata_value(reader, "tokenizer.ggml.pre") != "smollm":
        raise ValueError("the GGUF file's pre-tokenizer is not the one of SmolLM")

    tokens: list[str] = metadata_value(reader, "tokenizer.ggml.tokens")
    merges = [_merge_pair(line) for line in metadata_value(reader, "tokenizer.ggml.merges")]
    token_ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=token_ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_types: list[int] = metadata_value(reader, "tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, token_types, strict=True) if kind == _CONTROL_TOKEN_TYPE]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    special = _named_special_tokens(reader, tokens)
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / "tokenizer_config.json",
        special
        | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(metadata_value(reader, "llama.context_length")),
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata_value(reader, "tokenizer.chat_template"),
        },
    )


def _merge_pair(line: str) -> tuple[str, str]:
    # Spaces inside tokens are written as "Ġ", so the only space is the separator.
    left, right = line.split(" ")
    return left, right


def _named_special_tokens(reader: GGUFReader, tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        name: tokens[int(metadata_value(reader, f"tokenizer.ggml.{key}_token_id"))]
        for name, key in keys.items()
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
