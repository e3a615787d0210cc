"""A hash of what a profile predicts with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile


def fingerprint(profile: Profile) -> str:
    """Return a hash of everything that the profile predicts with. What a profile's file has beside that, as
    how well it was found to predict and its format, may change without changing a plan."""
    figures = asdict(profile)
    del figures["held_out" if isinstance(profile, CostModel) else "quality"]
    return hashlib.sha256(json.dumps(figures, sort_keys=True, allow_nan=False).encode()).hexdigest()
