"""A hash of a profile's content."""

from __future__ import annotations

import hashlib

from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import Profile
from loraplex.perf.profile_json import profile_to_json
from loraplex.perf.slot_profile import slot_profile_to_json


def fingerprint(profile: Profile) -> str:
    """Return a hash of everything that the profile predicts with."""
    text = profile_to_json(profile) if isinstance(profile, CostModel) else slot_profile_to_json(profile)
    return hashlib.sha256(text.encode()).hexdigest()
