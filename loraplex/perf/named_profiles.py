"""Profiles of either kind of engine, by the names of those in the package or by the paths of others.

`profiles/NAME.json` beside this file is the profile NAME. Each of our own engine has a twin, NAME-padded,
made when somebody asks for it, as it differs in one word. Engines with slots pad as they are.
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

Profile = SlotProfile | CostModel
PADDED: Final = "-padded"
"""Behind the name of a profile of our own engine: the same engine with kernels that pad."""


def find_profile(name: Path, model: str | None = None) -> Profile:
    """Return the profile of this path, or of this name if there is no such file. `model`: what it must be of.

    Raises ProfileError if there is neither, with the names that come near.
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
    """Every profile of the package by its name, each padded twin behind its own."""
    found: dict[str, Profile] = {}
    folder = files("loraplex.perf") / "profiles"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        name = file.name.removesuffix(".json")
        with as_file(file) as path:
            found[name] = profile = read_any_profile(path)
        if isinstance(profile, CostModel):
            found[name + PADDED] = with_padded_kernels(profile)
    return found


def model_of(profile: Profile) -> str:
    """The model as the profile names it."""
    return profile.subject.model if isinstance(profile, CostModel) else profile.model


def read_any_profile(path: Path) -> Profile:
    """Read a file of either kind."""
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
