"""The requests in the engine, waiting or running."""

from __future__ import annotations

from collections.abc import KeysView

from loraplex.scheduling.request_state import RequestState


class RequestTable:
    """Finds requests by id and by adapter version without iterating over the others."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestState] = {}
        self._on_version: dict[str, dict[str, RequestState]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> RequestState:
        return self._by_id[request_id]

    @property
    def ids(self) -> KeysView[str]:
        return self._by_id.keys()

    def get(self, request_id: str) -> RequestState | None:
        return self._by_id.get(request_id)

    def add(self, sequence: RequestState) -> None:
        self._by_id[sequence.request_id] = sequence
        if sequence.adapter is not None:
            self._on_version.setdefault(sequence.adapter, {})[sequence.request_id] = sequence

    def remove(self, sequence: RequestState) -> None:
        del self._by_id[sequence.request_id]
        if sequence.adapter is not None:
            others = self._on_version[sequence.adapter]
            del others[sequence.request_id]
            if not others:
                del self._on_version[sequence.adapter]

    def on_version(self, version: str) -> list[RequestState]:
        """Return the requests on an adapter version, in order of arrival."""
        return list(self._on_version.get(version, {}).values())

    def num_on_version(self, version: str) -> int:
        return len(self._on_version.get(version, ()))

    def check_integrity(self) -> None:
        """Assert that both indexes hold the same requests."""
        on_versions = {key: each for rows in self._on_version.values() for key, each in rows.items()}
        assert on_versions == {key: each for key, each in self._by_id.items() if each.adapter is not None}
        assert all(
            each.adapter == version for version in self._on_version for each in self.on_version(version)
        )
        assert all(self._on_version.values())
