"""Read the tenants file again when it changes. What cannot be used leaves the last usable file in force."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.tenants import TenantPolicy
from loraplex.server.tenants.tenants import Tenants
from loraplex.server.tenants.tenants_file import (
    TenantsFile,
    TenantsFileError,
    parse_tenants,
    read_text,
)

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5
_MAX_NAMED: Final = 10

Mark = tuple[int, ...] | None


class TenantsWatch:
    """Looks at the file twice a second; without changes this is one call of the system."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file. Raises TenantsFileError."""
        self._path = path
        self._mark = _mark(path)
        text = read_text(path)
        self._text: str | None = text
        self.tenants = Tenants(_tenants_of(text, path), clock)
        self._listeners: list[Callable[[Sequence[TenantPolicy]], None]] = []

    def subscribe(self, listener: Callable[[Sequence[TenantPolicy]], None]) -> None:
        """Call `listener` now and after each change, with what decisions about requests depend on."""
        self._listeners.append(listener)
        listener(self.tenants.policies())

    async def run(self) -> None:
        """Watch until cancelled. A defect is logged, and ends nothing."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.look()
            except Exception as error:
                logger.exception("the tenants file %s could not be put in force", self._path)
                kind = type(error).__name__
                self.tenants.trouble = f"{self._path} failed ({kind}); the server's log has the details"

    async def look(self) -> None:
        """Put the file in force if it has changed and can be used."""
        mark = await asyncio.to_thread(_mark, self._path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            text = await asyncio.to_thread(read_text, self._path)
            if text == self._text:
                self._settle()
                return
            file = await asyncio.to_thread(_tenants_of, text, self._path)
        except TenantsFileError as error:
            self._report(error)
            return
        self.tenants.replace(file)
        self._text = text
        self.tenants.trouble = None
        logger.info("the tenants file has changed and is in force: %s", _words(file))
        policies = self.tenants.policies()
        for listener in self._listeners:
            try:
                listener(policies)
            except Exception:
                logger.exception("a part of the server did not take the changed tenants")

    def notes(self, served: Sequence[str]) -> list[str]:
        """Return notes on patterns that match none of these adapters. They may match later ones."""
        notes = []
        for tenant in self.tenants.all():
            unmatched = [*tenant.adapters.unmatched(served), *tenant.administers.unmatched(served)]
            if unmatched:
                shown = ", ".join(map(repr, list(dict.fromkeys(unmatched))[:_MAX_NAMED]))
                notes.append(
                    f"[tenants.{tenant.name}] in {self._path}: no adapter is served that matches {shown}"
                )
        return notes

    def _settle(self) -> None:
        """Record that the file is the one in force."""
        if self.tenants.trouble is not None:
            self.tenants.trouble = None
            logger.info("the tenants file is again the one that is in force")

    def _report(self, error: TenantsFileError) -> None:
        if str(error) != self.tenants.trouble:
            self.tenants.trouble = str(error)
            logger.warning("%s; until then, the tenants file as it was before is in force", error)


def _tenants_of(text: str, path: Path) -> TenantsFile:
    """Return the tenants of a file's text. Raises TenantsFileError, also for a file without any: it would
    lock everybody out, and an editor may empty a file before it writes it."""
    file = parse_tenants(text, path)
    if not file.tenants:
        raise TenantsFileError(
            f"{path} has no tenants; add one with: loraplex tenant add NAME --tenants {path}, or start the "
            "server without --tenants"
        )
    return file


def _mark(path: Path) -> Mark:
    """Return what changes when the file does; None if it is not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def _words(file: TenantsFile) -> str:
    num_keys = sum(len(tenant.keys) for tenant in file.tenants.values())
    return f"{len(file.tenants):,} tenants with {num_keys:,} keys"
