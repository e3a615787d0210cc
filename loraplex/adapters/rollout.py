"""The versions of a name beside the one it stands for: one on trial, and those it stood for before.

load with a share ──▶ canary ──promote──▶ stable ──the next promote or load──▶ previous, latest first
                         └────abort────▶ gone        ▲────────────roll back────────────┘
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from loraplex.core.hub import HubRepo, parse_hub_repo

MAX_PREVIOUS: Final = 5
_HASH_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRef:
    """A version and where its files are, or were: nothing says that they are still there.

    `source` is the repository and commit that they were fetched from; None if they are the user's own.
    """

    version: str
    path: Path
    source: HubRepo | None = None

    @property
    def where(self) -> str:
        return str(self.source or self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A version on trial, and the share of its name's requests that it answers, between 0 and 1."""

    ref: VersionRef
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """`previous` has the last versions that the name stood for before the present one, latest first."""

    canary: Canary | None = None
    previous: tuple[VersionRef, ...] = ()


NO_OTHERS: Final = Rollout()
"""Of a name that has had one version only."""


def moved_on(previous: tuple[VersionRef, ...], old: VersionRef, new_version: str) -> tuple[VersionRef, ...]:
    """Return the previous versions of a name that moves from one to a new one, by a load or a promotion."""
    if old.version == new_version:
        return previous
    left = [ref for ref in previous if ref.version not in (old.version, new_version)]
    return (old, *left)[:MAX_PREVIOUS]


def moved_back(previous: tuple[VersionRef, ...], version: str) -> tuple[VersionRef, ...]:
    """Return the previous versions of a name that moves back to one of them. What came after that one is not
    remembered: to roll back once more leads further back, not forth again."""
    return previous[[ref.version for ref in previous].index(version) + 1 :]


def takes_canary(name: str, version: str, share: float, key: str) -> bool:
    """Return whether a request goes to the canary, by a hash of what identifies it or its user.

    Of many keys exactly the share do in the long run. One key is always answered by the same version, and
    when the share grows those that the canary answers stay with it. Another canary has other keys.
    """
    digest = hashlib.sha256("\0".join((name, version, key)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:_HASH_BYTES]) < share * 2.0 ** (8 * _HASH_BYTES)


def canary_to_json(canary: Canary | None) -> str | None:
    return None if canary is None else json.dumps({**_ref_to_dict(canary.ref), "share": canary.share})


def previous_to_json(previous: tuple[VersionRef, ...]) -> str:
    return json.dumps([_ref_to_dict(ref) for ref in previous])


def rollout_from_json(canary: str | None, previous: str) -> Rollout:
    """Raises ValueError, KeyError or TypeError on other text than the two functions above write."""
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
    repo = None if source is None else parse_hub_repo(source)
    if (repo is None) is not (source is None):
        raise ValueError(source)
    return VersionRef(version=stored["version"], path=Path(stored["path"]), source=repo)
