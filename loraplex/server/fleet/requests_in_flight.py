"""The requests that one front has on one server, by adapter version."""

from __future__ import annotations

from loraplex.server.version_use import VersionUse


class RequestsInFlight:
    """Counts of requests. `num`: all of them; `by_version`: those with an adapter."""

    def __init__(self) -> None:
        self._uses: dict[str, VersionUse] = {}
        self.by_version: dict[str, int] = {}
        self.num = 0

    def begin(self, version: str | None) -> None:
        self.num += 1
        if version is not None:
            self._uses.setdefault(version, VersionUse()).acquire()
            self.by_version[version] = self.by_version.get(version, 0) + 1

    def end(self, version: str | None) -> None:
        self.num -= 1
        if version is None:
            return
        self._uses[version].release()
        self.by_version[version] -= 1
        if self._uses[version].idle:
            del self._uses[version], self.by_version[version]

    def has(self, version: str) -> bool:
        return version in self._uses

    async def wait_idle(self, version: str) -> None:
        """Wait until no request uses a version."""
        if (use := self._uses.get(version)) is not None:
            await use.wait_idle()
