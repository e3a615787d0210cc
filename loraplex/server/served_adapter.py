"""A name, the version it stands for and its other versions, as a server has them in memory.

Every change of a name makes a new `ServedAdapter` from the old one; the service swaps it in at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from loraplex.adapters.remote import RemoteSource
from loraplex.adapters.rollout import Canary, Rollout, VersionRef, moved_back, moved_on, takes_canary
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import InvalidRequestError
from loraplex.server.adapter_files import ReadAdapter

_MIN_VERSION_CHARS: Final = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedCanary:
    """A version on trial, and its share of the name's requests."""

    adapter: ReadAdapter
    share: float

    @property
    def version(self) -> str:
        return self.adapter.spec.version


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAdapter:
    """A name and the version it stands for. `previous`: versions it stood for before, latest first."""

    name: str
    spec: AdapterSpec
    source: RemoteSource | None = None
    canary: ServedCanary | None = None
    previous: tuple[VersionRef, ...] = ()

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def ref(self) -> VersionRef:
        return VersionRef(version=self.version, path=self.spec.path, source=self.source)

    @property
    def adapters(self) -> tuple[ReadAdapter, ...]:
        """The version that the name stands for, and the one on trial."""
        stable = ReadAdapter(spec=self.spec, source=self.source)
        return (stable,) if self.canary is None else (stable, self.canary.adapter)

    @property
    def refs(self) -> tuple[VersionRef, ...]:
        return tuple(each.ref for each in self.adapters)

    @property
    def versions(self) -> set[str]:
        """All versions that may answer requests for the name."""
        return {self.version} if self.canary is None else {self.version, self.canary.version}

    @property
    def rollout(self) -> Rollout:
        canary = self.canary
        return Rollout(
            canary=None if canary is None else Canary(ref=canary.adapter.ref, share=canary.share),
            previous=self.previous,
        )

    def version_for(self, key: str) -> str:
        """Return the version that answers a request. `key` identifies the request or its user."""
        canary = self.canary
        if canary is not None and takes_canary(self.name, canary.version, canary.share, key):
            return canary.version
        return self.version

    def moved_to(self, adapter: ReadAdapter) -> ServedAdapter:
        """Return the name with another version. Raises InvalidRequestError if one is on trial."""
        self._refuse_canary("load another version")
        return self._moved_to(adapter)

    def with_canary(self, adapter: ReadAdapter, share: float) -> ServedAdapter:
        """Return the name with a version on trial, or a changed share. Raises InvalidRequestError if another
        one is on trial."""
        if adapter.spec.version == self.version:
            raise InvalidRequestError(
                f"the adapter {self.name!r} already stands for version {self.version[:12]}, so it cannot be "
                "its own canary; give the folder of another version",
                param="lora_path",
            )
        if self.canary is not None and self.canary.version != adapter.spec.version:
            self._refuse_canary("try another version")
        return replace(self, canary=ServedCanary(adapter=adapter, share=share))

    def promoted(self) -> ServedAdapter:
        """Return the name with the version that was on trial as its version."""
        return replace(self._moved_to(self._trial("promote").adapter), canary=None)

    def aborted(self) -> ServedAdapter:
        """Return the name without the version on trial."""
        self._trial("abort")
        return replace(self, canary=None)

    def rolled_back_to(self, adapter: ReadAdapter) -> ServedAdapter:
        """Return the name with one of `previous`, which was read again, as its version."""
        previous = moved_back(self.previous, adapter.spec.version)
        return replace(self, spec=adapter.spec, source=adapter.source, previous=previous)

    def find_previous(self, version: str | None) -> VersionRef:
        """Return the version to roll back to: the last one, or the one whose hash begins with `version`."""
        self._refuse_canary("roll back")
        if not self.previous:
            raise InvalidRequestError(
                f"the adapter {self.name!r} has no previous version to roll back to; load the one that you "
                "want with load_inplace",
                param="lora_name",
            )
        if version is None:
            return self.previous[0]
        found = [ref for ref in self.previous if ref.version.startswith(version)]
        if len(version) < _MIN_VERSION_CHARS or len(found) != 1:
            known = ", ".join(ref.version[:12] for ref in self.previous)
            raise InvalidRequestError(
                f"the adapter {self.name!r} has no previous version {version!r}; give the first "
                f"{_MIN_VERSION_CHARS} characters or more of one of these: {known}",
                param="version",
            )
        return found[0]

    def _moved_to(self, adapter: ReadAdapter) -> ServedAdapter:
        previous = moved_on(self.previous, self.ref, adapter.spec.version)
        return replace(self, spec=adapter.spec, source=adapter.source, previous=previous)

    def _trial(self, verb: str) -> ServedCanary:
        if self.canary is None:
            raise InvalidRequestError(
                f"the adapter {self.name!r} has no canary to {verb}; load a version with canary_share first",
                param="lora_name",
            )
        return self.canary

    def _refuse_canary(self, what: str) -> None:
        if self.canary is not None:
            raise InvalidRequestError(
                f"the adapter {self.name!r} has a canary (version {self.canary.version[:12]}, share "
                f"{self.canary.share:g}); promote or abort it, then {what}",
                param="lora_name",
            )
