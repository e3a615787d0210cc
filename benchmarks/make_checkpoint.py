"""Write a random checkpoint for the CPU benchmarks: a Llama (28M parameters by default) and N PEFT adapters.

    python -m benchmarks.make_checkpoint OUT --adapters 16 --size 0.5b

Layout: OUT/base (model and tokenizer), OUT/adapters/lora-0000, lora-0001, ...
Random weights cost an engine exactly as much as trained ones; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and its adapters; all query heads together, of width 64 each, are as wide as
    `hidden`."""

    hidden: int
    num_layers: int
    num_kv_heads: int
    mlp_hidden: int
    ranks: tuple[int, ...]
    vocab_size: int = VOCAB_SIZE

    @property
    def num_heads(self) -> int:
        return self.hidden // _HEAD_DIM

    @property
    def target_out_features(self) -> dict[str, int]:
        """The output width of each adapted projection; every input is `hidden` wide."""
        kv_size = self.num_kv_heads * _HEAD_DIM
        return dict(zip(TARGETS, (self.hidden, kv_size, kv_size, self.hidden), strict=True))

    def adapter_bytes(self, rank: int) -> int:
        """Return the weight bytes of one adapter of this rank, in float32."""
        floats_per_rank = self.num_layers * sum(
            self.hidden + out for out in self.target_out_features.values()
        )
        return 4 * floats_per_rank * rank


_HEAD_DIM = 64
SERVED = Size(hidden=512, num_layers=8, num_kv_heads=4, mlp_hidden=1408, ranks=(8, 16, 32, 64))
HALF_BILLION = Size(
    hidden=896, num_layers=24, num_kv_heads=2, mlp_hidden=4864, ranks=SERVED.ranks, vocab_size=65_536
)
"""The layers of Qwen2.5-0.5B, as a Llama; with this vocabulary and its own output head, 475M parameters."""
SMALL = Size(hidden=256, num_layers=2, num_kv_heads=2, mlp_hidden=512, ranks=(8, 16))
"""A size for several servers that share a few cores."""
SIZES = {"28m": SERVED, "0.5b": HALF_BILLION}


def adapter_name(index: int) -> str:
    """Return the name of an adapter, which is also that of its folder."""
    return f"lora-{index:04d}"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A base model and its adapters, as benchmarks write them under `root`."""

    root: Path
    num_adapters: int

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def adapter_names(self) -> list[str]:
        return [adapter_name(index) for index in range(self.num_adapters)]


def write_base(directory: Path, *, seed: int, size: Size = SERVED) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        intermediate_size=size.mlp_hidden,
        vocab_size=size.vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocab_size=size.vocab_size)


def write_tokenizer(directory: Path, *, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE in which every id decodes to its own ASCII text.

    Streaming detokenizers hold back a token that is part of a UTF-8 character, and then chunks would no
    longer be tokens; so bytes beyond ASCII have no id here.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab, merges = _ascii_bpe(vocab_size)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unk, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _ascii_bpe(vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    space, newline = "\u0120", "\u010a"  # how byte-level BPE spells " " and "\n"
    pieces = [*SPECIAL_TOKENS, *(chr(code) for code in range(33, 127)), space, newline]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [(first, second) for first in (space, *letters) for second in letters]
    num_merges = vocab_size - len(pieces)
    longest = merges
    while len(merges) < num_merges:  # every longest piece with every letter after it: triples, and so on
        longest = [("".join(merge), letter) for merge in longest for letter in letters]
        longest = longest[: num_merges - len(merges)]
        merges = merges + longest
    pieces += ["".join(merge) for merge in merges]
    assert len(set(pieces)) == len(pieces) == vocab_size
    return {piece: index for index, piece in enumerate(pieces)}, merges


def write_adapters(directory: Path, *, base: Path, num_adapters: int, seed: int, size: Size = SERVED) -> None:
    configs = {rank: _peft_config_text(rank, base=base) for rank in size.ranks}
    for index in range(num_adapters):
        rank = size.ranks[index % len(size.ranks)]
        target = directory / adapter_name(index)
        target.mkdir(parents=True, exist_ok=True)
        (target / "adapter_config.json").write_text(configs[rank])
        weights = _adapter_weights(size, rank, rng=np.random.default_rng((seed, index)))
        save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_config_text(rank: int, *, base: Path) -> str:
    """Return the config that PEFT itself writes for this rank (importing PEFT is slow)."""
    from tempfile import TemporaryDirectory

    from peft import LoraConfig, TaskType

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(TARGETS),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=str(base),
        inference_mode=True,
    )
    with TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        return (Path(scratch) / "adapter_config.json").read_text()


def _adapter_weights(
    size: Size, rank: int, *, rng: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    # A keeps the scale of its input and B is small: the delta changes the logits, and they stay finite.
    std_a, std_b = size.hidden**-0.5, 0.01
    weights = {}
    for layer in range(size.num_layers):
        for module, out_features in size.target_out_features.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{prefix}.lora_A.weight"] = _noise(rng, (rank, size.hidden), std=std_a)
            weights[f"{prefix}.lora_B.weight"] = _noise(rng, (out_features, rank), std=std_b)
    return weights


def _noise(rng: np.random.Generator, shape: tuple[int, int], *, std: float) -> npt.NDArray[np.float32]:
    """Return uniform noise of this deviation: several times faster to draw than normal, and as good here."""
    noise = rng.random(shape, dtype=np.float32)
    noise -= np.float32(0.5)
    noise *= np.float32(std * 12**0.5)
    return noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory to write into")
    parser.add_argument("--adapters", type=int, default=16, help="number of adapters (16)")
    parser.add_argument("--size", choices=SIZES, default="28m")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    base, adapters = args.out / "base", args.out / "adapters"

    started_s = time.perf_counter()
    size = SIZES[args.size]
    write_base(base, seed=args.seed, size=size)
    write_adapters(adapters, base=base, num_adapters=args.adapters, seed=args.seed + 1, size=size)
    num_bytes = sum(path.stat().st_size for path in args.out.rglob("*.safetensors"))
    summary = {
        "base": str(base),
        "adapters": args.adapters,
        "megabytes": round(num_bytes / 1e6, 1),
        "seconds": round(time.perf_counter() - started_s, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
