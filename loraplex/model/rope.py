"""Rotary position embedding: reading its settings and computing its table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.core.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Stretch long wavelengths by `factor`, keep short ones, blend between (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding settings; `linear_factor` divides every frequency (1 for none)."""

    theta: float
    head_dim: int
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None


def read_rope(raw: Mapping[str, Any], *, head_dim: int, source: Path) -> RopeConfig:
    """Return the settings of a config.json in the old (rope_theta, rope_scaling) or new (rope_parameters)
    form."""
    settings = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    theta = float(settings.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if float(settings.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor is not implemented")
    kind = settings.get("rope_type", settings.get("type", "default"))
    try:
        match kind:
            case "default":
                return RopeConfig(theta=theta, head_dim=head_dim)
            case "linear":
                return RopeConfig(theta=theta, head_dim=head_dim, linear_factor=float(settings["factor"]))
            case "llama3":
                scaling = Llama3Scaling(
                    factor=float(settings["factor"]),
                    low_freq_factor=float(settings["low_freq_factor"]),
                    high_freq_factor=float(settings["high_freq_factor"]),
                    original_max_position=int(settings["original_max_position_embeddings"]),
                )
                return RopeConfig(theta=theta, head_dim=head_dim, llama3=scaling)
    except KeyError as missing:
        raise ModelError(f"{source}: rope scaling {kind!r} lacks {missing}") from missing
    raise ModelError(
        f"{source}: rope scaling {kind!r} is not implemented; served are default, linear and llama3"
    )


def rope_table(config: RopeConfig, num_positions: int) -> torch.Tensor:
    """Return a float32 table of (positions, head_dim): cosines of every frequency, then sines."""
    import torch  # not at the top: a server reads configs before torch is imported

    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.theta**exponents) / config.linear_factor
    if config.llama3 is not None:
        inv_freq = _scale_llama3(inv_freq, config.llama3)
    angles = torch.arange(num_positions).float()[:, None] * inv_freq[None, :]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).contiguous()


def _scale_llama3(inv_freq: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    import torch

    wavelengths = 2 * math.pi / inv_freq
    low_wavelength = scaling.original_max_position / scaling.low_freq_factor
    high_wavelength = scaling.original_max_position / scaling.high_freq_factor
    keep = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * inv_freq / scaling.factor + keep * inv_freq
    scaled = torch.where(wavelengths > low_wavelength, inv_freq / scaling.factor, blended)
    return torch.where(wavelengths < high_wavelength, inv_freq, scaled)
