"""Find the files of an adapter that a request names, in allowed folders, on the hub or in S3, and read and
hash them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.base_name import other_base
from loraplex.adapters.open_file import open_regular
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.remote import RemoteSource, local_path, neither, parse_remote
from loraplex.adapters.rollout import VersionRef
from loraplex.adapters.s3 import why_no_s3
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import AdapterError, AdapterFormatError, PathNotAllowedError
from loraplex.core.hub import HubRepo
from loraplex.core.shape import ModelShape
from loraplex.server.remote_adapters import RemoteAdapters
from loraplex.server.tenants.tenants_file import LoadSources


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadAdapter:
    """An adapter that was read. `source`: the remote source and revision that its files were fetched from, if
    any. `other_base`: the base model it names, if that is not the one served."""

    spec: AdapterSpec
    source: RemoteSource | None
    other_base: str | None = None

    @property
    def ref(self) -> VersionRef:
        return VersionRef(version=self.spec.version, path=self.spec.path, source=self.source)


class AdapterFiles:
    """The adapters that may be loaded for one base model. `known_as` has the base model's names."""

    def __init__(
        self, *, shape: ModelShape, allowed: AllowedPaths, remote: RemoteAdapters, known_as: frozenset[str]
    ) -> None:
        self.shape = shape
        self.allowed = allowed
        self.remote = remote
        self.known_as = known_as

    async def read(self, path: str, sources: LoadSources | None = None) -> ReadAdapter:
        """Read the adapter in a folder or a remote source, which must also be within `sources`. A remote
        source is fetched completely before it is read.

        Raises AdapterError if there is no adapter or it cannot be served, PathNotAllowedError if the location
        is not open.
        """
        if sources is not None:
            return await self._within(sources).read(self._locate_within(sources, path))
        located = self._locate(path)
        if isinstance(located, Path):
            return await asyncio.to_thread(self._read, located, None)
        folder = await self.remote.fetch(located)
        return await asyncio.to_thread(self._read, folder, located.at(folder.name))

    def _within(self, sources: LoadSources) -> AdapterFiles:
        """Return a reader of files that are within `sources`. Its errors name no other folders."""
        remote = self.remote.within(sources.remote)
        return AdapterFiles(shape=self.shape, allowed=sources.paths, remote=remote, known_as=self.known_as)

    def _locate_within(self, sources: LoadSources, path: str) -> str:
        """Return the folder or remote source that a request means, if the server has opened it, and it is
        within `sources`."""
        try:
            located = self._within(sources)._locate(path)
            if isinstance(located, Path):
                return str(self._check_path(str(located)))
            self.remote.allowed.check(located)
        except PathNotAllowedError as error:
            raise PathNotAllowedError(
                f"{path!r} is not among the folders and repositories that this key's tenant may load "
                "adapters from; the operator opens them for it in the tenants file, with `load_from`, and "
                "for the server with --allow-adapter-dir or --allow-adapter-repo"
            ) from error
        return path

    async def read_again(self, ref: VersionRef) -> ReadAdapter:
        """Read a version whose files were read before.

        Raises AdapterFormatError if the files are gone or their content has changed, PathNotAllowedError if
        their location is no longer open.
        """
        try:
            found = await self._read_ref(ref)
        except AdapterError as error:
            raise AdapterFormatError(
                f"version {ref.version[:12]} cannot be read from {ref.where} any more: {error}; put its "
                "files back, or load it from where they are now"
            ) from error
        if found.spec.version != ref.version:
            raise AdapterFormatError(
                f"the files in {ref.where} have changed since version {ref.version[:12]} was read from them; "
                f"by their content hash they are version {found.spec.version[:12]} now; put the old ones "
                "back, or load that version from where it is now"
            )
        return found

    async def _read_ref(self, ref: VersionRef) -> ReadAdapter:
        if ref.source is None:
            return await asyncio.to_thread(self._read, self._check_path(str(ref.path)), None)
        self.remote.allowed.check(ref.source)
        folder = await self.remote.fetch(ref.source)
        return await asyncio.to_thread(self._read, folder, ref.source)

    def _read(self, folder: Path, source: RemoteSource | None) -> ReadAdapter:
        # Caches are outside the allowed folders, and the hub client's consists of symlinks to the contents.
        open_file = self.allowed.open if source is None else open_regular
        spec = read_adapter(folder, self.shape, open_file=open_file)
        other = other_base(folder, self.known_as, open_file)
        return ReadAdapter(spec=spec, source=source, other_base=other)

    def _locate(self, path: str) -> Path | RemoteSource:
        """Return the folder or remote source that a request means, if it may be loaded. An existing folder
        wins."""
        given = local_path(path)
        remote = None if given is not None else parse_remote(path)
        path = given or path
        if remote is None:
            if given is None and (why := why_no_s3(path)) is not None:
                raise AdapterFormatError(why)
            folder = self._check_path(path)
            if _is_missing(folder):
                raise AdapterFormatError(neither(self.allowed.explain_missing(path)))
            return folder
        if self.allowed.roots and isinstance(remote, HubRepo):
            folder = self._check_path(path)
            if os.path.exists(folder):
                return folder
        try:
            self.remote.allowed.check(remote)
        except PathNotAllowedError as error:
            raise PathNotAllowedError(
                f"{self.allowed.explain_missing(path)}, and {error}, or with --allow-adapter-dir FOLDER to "
                "open a folder"
            ) from None
        return remote

    def _check_path(self, path: str) -> Path:
        try:
            return self.allowed.check(path)
        except PathNotAllowedError as error:
            raise PathNotAllowedError(
                f"{error}; start the server with --allow-adapter-dir FOLDER to open one"
            ) from None


def _is_missing(folder: Path) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # the later read reports why
        return False
    return False
