"""The base model that an adapter says it was trained on, compared with the one being served.

Shapes tell most models apart, but not a model from its own fine-tune. A name proves nothing either: it may be
a folder on another machine. So a different name is a warning, not a refusal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loraplex.adapters.checkpoint_files import open_checkpoint
from loraplex.adapters.open_file import OpenFile, open_regular
from loraplex.adapters.peft_config import parse_config, shorten
from loraplex.adapters.spec import CONFIG_FILE
from loraplex.core.errors import UserError

_MAX_NAME_CHARS: Final = 100
_MAX_ADAPTERS_NAMED: Final = 5

# Where the Hugging Face hub keeps a model on disk; the last part of the path is a commit.
_HUB_SNAPSHOT: Final = re.compile(r"(?:^|/)models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+$")


def short_name(name: str) -> str:
    """Return the last part of a path or hub id ("" if there is none); for a folder of the hub's cache, its
    model."""
    path = name.strip().replace("\\", "/").rstrip("/")
    snapshot = _HUB_SNAPSHOT.search(path)
    return snapshot[1] if snapshot else path.rpartition("/")[2]


def comparable_name(name: str) -> str:
    """Return the short name in lower case, for comparison."""
    return short_name(name).lower().strip(".")


def public_name(model: str) -> str:
    """Return the name that clients use for a model by default: a folder's name, not its path, or a hub id."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    return short_name(os.path.abspath(folder)) or model  # "/" has no name


def base_names(model: str, *served_as: str) -> frozenset[str]:
    """Return all names of a base model: as given, the real path of its folder, as served."""
    names = [model, *served_as]
    folder = Path(model).expanduser()
    if folder.is_dir():
        names.append(str(folder.resolve()))
    return frozenset(map(comparable_name, names))


def other_base(path: Path, known: frozenset[str], open_file: OpenFile = open_regular) -> str | None:
    """Return the base model that the adapter in a folder names; None if it names none, or a known one."""
    try:
        with open_checkpoint(path, open_file) as files:
            name = (
                parse_config(files.read_config()).get("base_model_name_or_path")
                if files.config is not None
                else None
            )
    except (UserError, OSError):
        return None  # `read_adapter` reports what is wrong with the files
    if not isinstance(name, str) or comparable_name(name) in ("", *known):
        return None
    return shorten(name, max_chars=_MAX_NAME_CHARS)


def other_base_warning(other: str, base_model: str) -> str:
    return (
        f"trained on {other!r}, says {CONFIG_FILE}, not on {base_model!r}; "
        "answers are right only if these are the same model"
    )


def name_adapters(names: Sequence[str]) -> str:
    """Return the subject of a warning about one or many adapters."""
    if len(names) == 1:
        return f"adapter {names[0]!r}"
    more = len(names) - _MAX_ADAPTERS_NAMED
    return f"adapters {', '.join(map(repr, names[:_MAX_ADAPTERS_NAMED]))}" + (
        f" and {more} more" if more > 0 else ""
    )
