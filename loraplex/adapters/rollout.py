"""The other versions of a name, beside its stable one: a canary, and previous versions.

load with a share ──▶ canary ──promote──▶ stable ──the next promote or load──▶ previous, latest first
                         └────abort────▶ gone        ▲────────────roll back────────────┘
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.adapters.remote import RemoteSource, parse_remote

MAX_PREVIOUS: Final = 5
_HASH_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRef:
    """A version and the folder of its files, which may be gone by now.

    `source` is the remote source with the revision that the files were fetched from; None if they are the
    user's own.
    """

    version: str
    path: Path
    source: RemoteSource | None = None

    @property
    def where(self) -> str:
        return str(self.source or self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A canary version, and the share of its name's requests that it answers, between 0 and 1."""

    ref: VersionRef
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A name's canary, and the versions that it stood for before the present one, latest first."""

    canary: Canary | None = None
    previous: tuple[VersionRef, ...] = ()


NO_OTHERS: Final = Rollout()
"""The rollout of a name that has had one version only."""


def moved_on(previous: tuple[VersionRef, ...], old: VersionRef, new_version: str) -> tuple[VersionRef, ...]:
    """Return the previous versions of a name after a load or promotion moves it to a new version."""
    if old.version == new_version:
        return previous
    left = [ref for ref in previous if ref.version not in (old.version, new_version)]
    return (old, *left)[:MAX_PREVIOUS]


def moved_back(previous: tuple[VersionRef, ...], version: str) -> tuple[VersionRef, ...]:
    """Return the previous versions of a name after it is rolled back to one of them.

    Versions after that one are dropped: another rollback leads further back, not forward again.
    """
    return previous[[ref.version for ref in previous].index(version) + 1 :]


def takes_canary(name: str, version: str, share: float, key: str) -> bool:
    """Return whether a request goes to the canary, by a hash of the key that identifies it or its user.

    In the long run exactly this share of keys does. One key is always answered by the same version, and when
    the share grows, keys on the canary stay there. Another canary gets other keys.
    """
    digest = hashlib.sha256("\0".join((name, version, key)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:_HASH_BYTES]) < share * 2.0 ** (8 * _HASH_BYTES)


def canary_to_json(canary: Canary | None) -> str | None:
    return None if canary is None else json.dumps({**_ref_to_dict(canary.ref), "share": canary.share})


def previous_to_json(previous: tuple[VersionRef, ...]) -> str:
    return json.dumps([_ref_to_dict(ref) for ref in previous])


def rollout_from_json(canary: str | None, previous: str) -> Rollout:
    """Return the rollout that the two functions above wrote; ValueError, KeyError or TypeError on other
    text."""
    stored = None if canary is None else json.loads(canary)
    return Rollout(
        canary=None if stored is None else Canary(ref=_ref_from_dict(stored), share=float(stored["share"])),
        previous=tuple(map(_ref_from_dict, json.loads(previous))),
    )


def _ref_to_dict(ref: VersionRef) -> dict[str, Any]:
    source = None if ref.source is None else str(ref.source)
    return {"version": ref.version, "path": str(ref.path), "source": source}


def _ref_from_dict(stored: dict[str, Any]) -> VersionRef:
    source = stored["source"]
    remote = None if source is None else parse_remote(source)
    if (remote is None) is not (source is None):
        raise ValueError(source)
    return VersionRef(version=stored["version"], path=Path(stored["path"]), source=remote)
