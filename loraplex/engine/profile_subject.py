"""Which profile is this engine's: one answer for `loraplex profile` and for whoever looks for its file."""

from __future__ import annotations

from pathlib import Path

import torch

from loraplex.core.paths import cache_dir
from loraplex.core.shape import ModelShape
from loraplex.engine.machine import cpu_model, num_cores
from loraplex.perf.subject import Subject, shape_key


def subject_of(shape: ModelShape, device: str, dtype: torch.dtype) -> Subject:
    """`device`: cpu or cuda. `shape`: of the model, or of each shard where it is cut."""
    machine = f"{num_cores()} cores of {cpu_model()}"
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name(0)}, {machine}"
    return Subject(
        machine=machine,
        device=device,
        model=shape_key(shape),
        dtype=str(dtype).removeprefix("torch."),
        num_layers=shape.num_layers,
    )


def profile_path(subject: Subject) -> Path:
    """Where its profile is kept: it can be made again, so it is in the cache."""
    return cache_dir() / "profiles" / subject.file_name
