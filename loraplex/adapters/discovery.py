"""Finding the adapters in a folder: one subfolder each, whose name is the adapter's.

sql/adapter_config.json          sql
my-org/sql/adapter_config.json   my-org/sql
"""

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
    """Return every subfolder of `folder` that has an adapter_config.json, and where one has none, its own
    subfolders that do. Files are neither opened nor checked."""
    children = _children(folder)

    found: list[tuple[str, Path]] = []
    notes: list[str] = []
    if folder / CONFIG_FILE in children:
        notes.append(f"{folder} is itself an adapter; name its parent folder to serve it")
    for child in children:
        if not os.path.isdir(child):
            continue
        adapters = [child] if _is_adapter(child) else _adapters_in(child)
        if not adapters:
            notes.append(f"skipped {child}: no {CONFIG_FILE} in it")
        for adapter in adapters:
            try:
                found.append((validate_adapter_name(adapter.relative_to(folder).as_posix()), adapter))
            except InvalidRequestError as exc:
                notes.append(f"skipped {adapter}: {exc}")
    return Discovery(adapters=tuple(sorted(found)), notes=tuple(notes))


def _is_adapter(folder: Path) -> bool:
    return os.path.isfile(folder / CONFIG_FILE)


def _adapters_in(folder: Path) -> list[Path]:
    try:
        return [child for child in _children(folder) if _is_adapter(child)]
    except AdapterError:
        return []  # it cannot be read


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        if folder.parts[:1] == ("s3:",):
            raise AdapterError(
                "--adapters takes folders of this machine; name each adapter of a bucket with "
                "--adapter NAME=s3://bucket/prefix"
            ) from None
        raise AdapterError(f"the adapter folder {folder} does not exist; create it or name another") from None
    except NotADirectoryError:
        raise AdapterError(f"{folder} is a file; name the folder whose subfolders are the adapters") from None
    except OSError as exc:
        raise AdapterError(f"the adapter folder {folder} cannot be read: {exc.strerror}") from exc
