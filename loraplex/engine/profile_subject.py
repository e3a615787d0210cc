"""Finds the profile of an engine, for `loraplex profile` and for every reader of the file."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from loraplex.core.paths import cache_dir
from loraplex.core.shape import ModelShape
from loraplex.engine.machine import cpu_model, num_cores
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.named_profiles import profile_of
from loraplex.perf.profile_json import ProfileError, read_profile
from loraplex.perf.subject import Subject, machine_name, shape_key

logger = logging.getLogger(__name__)


def subject_of(shape: ModelShape, device: str, dtype: torch.dtype) -> Subject:
    """Return the subject of an engine's profile. `device`: cpu or cuda. `shape`: shape of the model, or of
    each shard."""
    gpu = torch.cuda.get_device_name(0) if device == "cuda" else None
    return Subject(
        machine=machine_name(num_cores=num_cores(), cpu=cpu_model(), gpu=gpu),
        device=device,
        model=shape_key(shape),
        dtype=str(dtype).removeprefix("torch."),
        num_layers=shape.num_layers,
    )


def known_costs(shape: ModelShape, device: str, dtype: torch.dtype) -> CostModel:
    """Return the costs that `loraplex profile` measured for this engine; without a profile, those of the
    package if they were measured on such a machine, or else default guesses."""
    subject = subject_of(shape, device, dtype)
    path = profile_path(subject)
    if path.exists():
        try:
            return read_profile(path, subject)
        except ProfileError as error:
            logger.warning("%s", error)
    shipped = profile_of(subject)
    if shipped is not None:
        return shipped
    return default_cost_model(subject, shape, num_cores=num_cores())


def profile_path(subject: Subject) -> Path:
    """Return the path of a profile. It can be measured again, so it is in the cache folder."""
    return cache_dir() / "profiles" / subject.file_name
