"""The placement that a fleet was given, as a file in the state folder, which a front that restarts takes up.

There is one for each base model, as in the registry. It is replaced atomically before the placement takes
effect, so that a front that is killed in between goes on with it when it is back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from loraplex.core.errors import StorageError
from loraplex.core.whole_file import write_whole
from loraplex.server.decoders import decode_json
from loraplex.server.requests import PlacementRequest

FOLDER: Final = "placements"
_VERSION: Final = 1


class KeptPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A placement as it was given. `since_unix_s`: when that was."""

    loraplex_placement: int = _VERSION
    base_model: str
    since_unix_s: float
    given: PlacementRequest


class PlacementFile:
    """The file of one base model. `base_model`: its key in the registry. Methods raise StorageError, with
    what to do about it."""

    def __init__(self, state_dir: Path, base_model: str) -> None:
        self.base_model = base_model
        self._path = state_dir / FOLDER / f"{hashlib.sha256(base_model.encode()).hexdigest()[:16]}.json"

    def read(self) -> KeptPlacement | None:
        """Return what is kept; None if nothing is."""
        with self._translated_errors("read"):
            try:
                kept = decode_json(self._path.read_bytes(), KeptPlacement)
            except FileNotFoundError:
                return None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise StorageError(
                    f"{self._path} is no placement of a fleet ({error}); apply the plan again, or delete the "
                    "file"
                ) from None
        if kept.loraplex_placement != _VERSION or kept.base_model != self.base_model:
            raise StorageError(
                f"{self._path} is a placement of another version of loraplex, or of another base model; "
                "apply the plan again, or delete the file"
            )
        return kept

    def write(self, kept: KeptPlacement) -> None:
        """Replace what is kept, atomically."""
        with self._translated_errors("written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, msgspec.json.encode(kept))

    def forget(self) -> None:
        """Keep nothing from now on."""
        with self._translated_errors("deleted"):
            self._path.unlink(missing_ok=True)

    @contextmanager
    def _translated_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the placement that the fleet was given, {self._path}, cannot be {what}: {error.strerror}; "
                "make the state folder writable and have space in it"
            ) from error
