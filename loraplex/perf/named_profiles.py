"""Profiles of both kinds of engine, by name if they are in the package, or by path.

`profiles/NAME.json` beside this file is the profile NAME. Each profile of our own engine has a variant,
NAME-padded, made on demand, as it differs in one word. Slot engines pad anyway.
"""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from loraplex.core.words import unknown_name
from loraplex.perf.cost_model import CostModel, with_padded_kernels
from loraplex.perf.profile_json import ProfileError, read_profile
from loraplex.perf.slot_profile import KIND, SlotProfile, read_slot_profile
from loraplex.perf.subject import Subject

Profile = SlotProfile | CostModel
PADDED: Final = "-padded"
"""Suffix of a profile of our own engine: the same engine with kernels that pad."""


def find_profile(name: Path, model: str | None = None) -> Profile:
    """Return the profile at this path, or of this name if there is no such file. `model`: the required model.

    Raises ProfileError if there is neither, with similar names.
    """
    is_file = name.exists() and not name.is_dir()
    profile = read_any_profile(name) if is_file else _profile_named(str(name))
    if model is not None and (found := model_of(profile)) != model:
        raise ProfileError(
            f"{name}: it is of model {found!r}, not {model!r}; give a profile of that model, or leave "
            "--model out"
        )
    return profile


def named_profiles() -> dict[str, Profile]:
    """Return every profile of the package by name, each followed by its padded variant."""
    found: dict[str, Profile] = {}
    folder = files("loraplex.perf") / "profiles"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        name = file.name.removesuffix(".json")
        with as_file(file) as path:
            found[name] = profile = read_any_profile(path)
        if isinstance(profile, CostModel):
            found[name + PADDED] = with_padded_kernels(profile)
    return found


def profile_of(subject: Subject) -> CostModel | None:
    """Return the profile of the package that was measured on such an engine and machine; None if there is
    none."""
    found = (each for each in named_profiles().values() if isinstance(each, CostModel))
    return next((each for each in found if each.subject == subject), None)


def model_of(profile: Profile) -> str:
    """Return the profile's name of its model."""
    return profile.subject.model if isinstance(profile, CostModel) else profile.model


def read_any_profile(path: Path) -> Profile:
    """Read a profile of either kind. Raises ProfileError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(
            f"{path}: the profile cannot be read ({error}); make one with `loraplex profile`, or with "
            "`loraplex profile fit`"
        ) from error
    is_of_slots = isinstance(document, dict) and document.get("kind") == KIND
    return read_slot_profile(path) if is_of_slots else read_profile(path)


def _profile_named(name: str) -> Profile:
    named = named_profiles()
    if name not in named:
        raise ProfileError(
            f"{unknown_name('file or named profile', name, named)} (`loraplex profile list` tells of those "
            "that have a name; `loraplex profile` and `loraplex profile fit` make others)"
        )
    return named[name]
