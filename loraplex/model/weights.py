"""Loads a checkpoint's safetensors into the forward pass's stacked weights, strictly.

Every tensor the model needs must be there in the right shape, and the files must hold no tensor that the
model does not need: a checkpoint that does not match its config is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from loraplex.adapters.tensors import parse_header
from loraplex.core.errors import ModelError
from loraplex.core.modules import GROUPS, MODULES, module_path
from loraplex.core.words import plural
from loraplex.model.config import ModelConfig
from loraplex.model.sharding import WHOLE, Shard

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, total bytes)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """Weights of one layer; linears that share an input are stacked along their outputs."""

    linears: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    input_norm_H: torch.Tensor
    post_norm_H: torch.Tensor
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights of a model, on one device in one dtype.

    A shard's weights are its part of each linear and of `lm_head_VH`, and the whole embedding and norms.
    """

    embedding_VH: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: torch.Tensor
    lm_head_VH: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, or a shard's part of one.

    `values` is mapped: bytes are read from the file when they are accessed. `file` is the open file's
    descriptor, and `offset` is where its values begin in it; None if they are not contiguous or not in the
    file.
    """

    values: torch.Tensor
    file: int
    offset: int | None

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    *,
    place: Callable[[StoredTensor], torch.Tensor] | None = None,
    threads: Executor | None = None,
) -> ModelWeights:
    """Read a checkpoint, or a shard of it. `config` is that of the whole model. Raises ModelError.

    `place` brings a tensor to the memory where it is used, in the right dtype; by default the CPU's, in
    `dtype`. It runs in `threads` if given, otherwise in the caller's thread.
    """
    wanted = _expected_shapes(config)
    place = place or (lambda stored: stored.values.to(dtype))
    with ExitStack() as opened:
        # Mapped: only the shard's parts of the files will be read.
        parts = {
            name: _stored_part(_part_of(name, stored.values, shard), stored)
            for path in _weight_files(folder)
            for name, stored in _tensors_of(opened.enter_context(FileIO(path)), path, wanted)
        }
        missing = sorted(wanted.keys() - parts.keys())
        if missing:
            raise ModelError(
                f"{folder} lacks {len(missing)} {plural('tensor', len(missing))} of a {config.architecture}: "
                f"{_some(missing)}. "
                "The checkpoint is incomplete, or its config.json belongs to another model."
            )
        placed = map(place, parts.values()) if threads is None else threads.map(place, parts.values())
        total_bytes, read_bytes = sum(part.num_bytes for part in parts.values()), 0
        tensors: dict[str, torch.Tensor] = {}
        for (name, part), tensor in zip(parts.items(), placed, strict=True):
            tensors[name] = tensor
            read_bytes += part.num_bytes
            if progress is not None:
                progress(read_bytes, total_bytes)
    return _stack(tensors, config, shard)


def _stored_part(part: torch.Tensor, whole: StoredTensor) -> StoredTensor:
    """Return the stored part of a tensor; without an offset for zeros, which are in no file."""
    assert whole.offset is not None
    begin = part.data_ptr() - whole.values.data_ptr()
    is_stretch = part.is_contiguous() and 0 <= begin < whole.num_bytes
    return StoredTensor(values=part, file=whole.file, offset=whole.offset + begin if is_stretch else None)


def _part_of(name: str, tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    if name == "lm_head.weight":
        return shard.vocabulary(tensor)
    *_, module, kind = name.split(".")
    if module not in MODULES:
        return tensor
    return shard.linear(module, tensor) if kind == "weight" else shard.bias(module, tensor)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size of a model's weights in bytes."""
    return sum(prod(shape) for shape in _expected_shapes(config).values()) * dtype.itemsize


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shape = config.shape
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "model.norm.weight": (shape.hidden_size,),
    }
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (shape.vocab_size, shape.hidden_size)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.input_layernorm.weight"] = (shape.hidden_size,)
        expected[f"{prefix}.post_attention_layernorm.weight"] = (shape.hidden_size,)
        if config.qk_norm:
            expected[f"{prefix}.self_attn.q_norm.weight"] = (shape.head_dim,)
            expected[f"{prefix}.self_attn.k_norm.weight"] = (shape.head_dim,)
        for group, modules in GROUPS.items():
            for module in modules:
                path = module_path(layer, module)
                expected[f"{path}.weight"] = (shape.out_features(module), shape.in_features(module))
                if _has_bias(config, group):
                    expected[f"{path}.bias"] = (shape.out_features(module),)
    return expected


def _has_bias(config: ModelConfig, group: str) -> bool:
    return (group == "qkv" and config.qkv_bias) or (group == "o" and config.o_bias)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is not a shard index: {error}") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{folder} lacks shards that its index names: {_some(absent)}")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    hint = ""
    if list(folder.glob("*.bin")):
        hint = " Pickled .bin weights are never opened; convert them with transformers' save_pretrained."
    raise ModelError(f"{folder} holds no model.safetensors and no model.safetensors.index.json.{hint}")


def _tensors_of(
    file: FileIO, path: Path, wanted: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, StoredTensor]]:
    try:
        # By descriptor: the file at the path may have been replaced.
        with safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as checkpoint:
            header = parse_header(file)
            for name in checkpoint.keys():  # noqa: SIM118 (a safetensors handle is no dict)
                if _is_redundant(name, wanted):
                    continue
                if name not in wanted:
                    raise ModelError(f"{path} holds {name}, which this architecture does not have")
                tensor = checkpoint.get_tensor(name)
                if tuple(tensor.shape) != wanted[name]:
                    raise ModelError(
                        f"{path}: {name} has shape {tuple(tensor.shape)}, config.json says {wanted[name]}"
                    )
                if not tensor.dtype.is_floating_point or tensor.element_size() == 1:
                    raise ModelError(f"{path}: {name} is {tensor.dtype}; quantised weights are not served")
                offset = header.data_start + header.tensors[name].begin
                yield name, StoredTensor(values=tensor, file=file.fileno(), offset=offset)
    except SafetensorError as error:
        raise ModelError(f"{path} is truncated or corrupt: {error}. Download it again.") from error


def _is_redundant(name: str, wanted: dict[str, tuple[int, ...]]) -> bool:
    """Return whether this is a tensor that old checkpoints carry and that the model does not need."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in wanted)


def _stack(tensors: dict[str, torch.Tensor], config: ModelConfig, shard: Shard) -> ModelWeights:
    layers = []
    for layer in range(config.shape.num_layers):
        prefix = f"model.layers.{layer}"
        linears, biases = {}, {}
        for group, modules in GROUPS.items():
            paths = [module_path(layer, module) for module in modules]
            linears[group] = torch.cat([tensors.pop(f"{path}.weight") for path in paths])
            if _has_bias(config, group):
                biases[group] = torch.cat([tensors.pop(f"{path}.bias") for path in paths])
        layers.append(
            LayerWeights(
                linears=linears,
                biases=biases,
                input_norm_H=tensors.pop(f"{prefix}.input_layernorm.weight"),
                post_norm_H=tensors.pop(f"{prefix}.post_attention_layernorm.weight"),
                q_norm_D=tensors.pop(f"{prefix}.self_attn.q_norm.weight", None),
                k_norm_D=tensors.pop(f"{prefix}.self_attn.k_norm.weight", None),
            )
        )
    embedding = tensors["model.embed_tokens.weight"]
    tied = config.tie_word_embeddings
    return ModelWeights(
        embedding_VH=embedding,
        layers=tuple(layers),
        final_norm_H=tensors["model.norm.weight"],
        lm_head_VH=shard.vocabulary(embedding) if tied else tensors["lm_head.weight"],
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown}, ..." if len(names) > 3 else shown
