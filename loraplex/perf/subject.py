"""The engine that a cost model is about: a measurement on one machine does not hold for another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from loraplex.core.shape import ModelShape

_SIZES: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)
_SHAPE_KEY: Final = re.compile(r"(.+)-(\d+)x(\d+)-mlp(\d+)-heads(\d+)\.(\d+)x(\d+)-vocab(\d+)")
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes of engines, and the bytes of an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Machine, device, model and dtype of an engine. `machine`: see `machine_name`. `model`: its
    shape (`shape_key`); costs depend on shapes, not on weights, so fine-tunes of one base share a profile."""

    machine: str
    device: str
    model: str
    dtype: str
    num_layers: int

    @property
    def file_name(self) -> str:
        """A readable file name, the same for equal subjects."""
        parts = (self.machine, self.device, self.model, self.dtype)
        return "--".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json"

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of an adapter's weights."""
        return ELEMENT_BYTES.get(self.dtype, 2)

    @property
    def num_cores(self) -> int | None:
        """The number of cores of the machine; None if its name does not say."""
        found = re.search(r"(\d+) cores? of ", self.machine)
        return None if found is None else int(found[1])

    def differences(self, other: Subject) -> list[str]:
        """Return the fields that differ, in words."""
        return [
            f"{name} {getattr(self, name)!r} instead of {getattr(other, name)!r}"
            for name in ("machine", "device", "model", "dtype", "num_layers")
            if getattr(self, name) != getattr(other, name)
        ]


def shape_of_key(key: str) -> ModelShape:
    """Return the shape that `shape_key` made a key of; the context length is not in it, and 1 here. Raises
    ValueError for another text."""
    found = _SHAPE_KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"{key!r} is no key of a model's shape")
    family, *sizes = found.groups()
    return ModelShape(family=family, **dict(zip(_SIZES, map(int, sizes), strict=True)), max_position=1)


def machine_name(*, num_cores: int, cpu: str, gpu: str | None = None) -> str:
    """Return the name of a machine: its GPU, its number of cores and its processor."""
    cores = f"{num_cores} cores of {cpu}"
    return cores if gpu is None else f"{gpu}, {cores}"


def shape_key(shape: ModelShape) -> str:
    """Return a key of everything that decides a model's costs, except its context length."""
    return (
        f"{shape.family}-{shape.num_layers}x{shape.hidden_size}-mlp{shape.intermediate_size}"
        f"-heads{shape.num_heads}.{shape.num_kv_heads}x{shape.head_dim}-vocab{shape.vocab_size}"
    )
