"""Resolves profiles given to commands by name or file, with helpful errors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.core.errors import UserError

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile


def find_given_profile(path: Path, model: str | None = None) -> Profile:
    """Return the profile of this path or name. `model`: the required model. Raises UserError that says what
    to give instead."""
    from loraplex.perf.named_profiles import find_profile, named_profiles

    if path.exists() and not path.is_dir():
        return find_profile(path, model)
    name, known = str(path), named_profiles()
    if name not in known and name.lower() in known:
        raise UserError(f"there is no file or named profile {name!r}; did you mean {name.lower()}?")
    if name not in known and path.is_dir():
        given = "nothing, or this folder" if path == Path() else f"{name}, a folder"
        raise UserError(
            f"a profile is wanted, and what is given is {given}; name a file of `loraplex profile`, or one "
            "of `loraplex profile list`"
        )
    return find_profile(path, model)
