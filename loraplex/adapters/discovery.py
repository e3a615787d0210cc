"""Finding the adapters in a folder: one subfolder each, whose name is the adapter's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.names import validate_adapter_name
from loraplex.adapters.spec import CONFIG_FILE
from loraplex.core.errors import AdapterError, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """Adapters found in a folder, as (name, path) sorted by name; `notes` says what was skipped and why."""

    adapters: tuple[tuple[str, Path], ...]
    notes: tuple[str, ...]


def discover_adapters(folder: Path) -> Discovery:
    """Return every subfolder of `folder` that has an adapter_config.json. Files are neither opened nor
    checked."""
    try:
        children = sorted(folder.iterdir())
    except FileNotFoundError:
        raise AdapterError(f"the adapter folder {folder} does not exist; create it or name another") from None
    except NotADirectoryError:
        raise AdapterError(f"{folder} is a file; name the folder whose subfolders are the adapters") from None
    except OSError as exc:
        raise AdapterError(f"the adapter folder {folder} cannot be read: {exc.strerror}") from exc

    found: list[tuple[str, Path]] = []
    notes: list[str] = []
    if folder / CONFIG_FILE in children:
        notes.append(f"{folder} is itself an adapter; name its parent folder to serve it")
    for child in children:
        if not os.path.isdir(child):
            continue
        if not os.path.isfile(child / CONFIG_FILE):
            notes.append(f"skipped {child}: no {CONFIG_FILE} in it")
            continue
        try:
            found.append((validate_adapter_name(child.name), child))
        except InvalidRequestError as exc:
            notes.append(f"skipped {child}: {exc}")
    return Discovery(adapters=tuple(found), notes=tuple(notes))
