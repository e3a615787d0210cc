"""API keys of tenants, and what is stored of them.

A key is 256 random bits, so its SHA-256 can be neither inverted nor guessed: the slow and salted hashes of
passwords would only make each request slower.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

_PREFIX: Final = "lpx-"
_NUM_BYTES: Final = 32
_STORED: Final = re.compile(r"sha256:([0-9a-fA-F]{64})(?: until (\S+))?")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKey:
    """A key as the tenants file has it. `until`: it is not valid any more from then on."""

    digest: bytes
    until: datetime | None = None

    @classmethod
    def parse(cls, text: str) -> StoredKey:
        """Raise ValueError, with what a key looks like, for anything else."""
        found = _STORED.fullmatch(text)
        if found is None:
            raise ValueError(
                "a key is stored as 'sha256:' and the 64 hexadecimal digits of its hash, as `loraplex tenant "
                "add` and `loraplex tenant rotate` write it"
            )
        digest, until = found.groups()
        return cls(digest=bytes.fromhex(digest), until=None if until is None else _parse_time(until))

    @classmethod
    def of(cls, key: str) -> StoredKey:
        return cls(digest=digest_of(key.encode()))

    @property
    def text(self) -> str:
        until = "" if self.until is None else f" until {self.until:%Y-%m-%dT%H:%M:%SZ}"
        return f"sha256:{self.digest.hex()}{until}"

    def is_valid(self, now: datetime) -> bool:
        return self.until is None or now < self.until


class KeyRing(Generic[T]):
    """Finds the owner of a key in the same time for any number of keys, and without comparing what an
    attacker knows: keys are found by a hash with a secret of this process."""

    def __init__(self, owners: Iterable[tuple[StoredKey, T]]) -> None:
        self._secret = secrets.token_bytes(_NUM_BYTES)
        self._owners = {self._index(key.digest): (key, owner) for key, owner in owners}

    def find(self, key: bytes) -> T | None:
        """Return the owner of a key that is valid now; None if there is none."""
        digest = digest_of(key)
        stored, owner = self._owners.get(self._index(digest), (None, None))
        if stored is None or not hmac.compare_digest(stored.digest, digest):
            return None
        return owner if stored.is_valid(datetime.now(UTC)) else None

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret).digest()


def new_key() -> str:
    return f"{_PREFIX}{secrets.token_urlsafe(_NUM_BYTES)}"


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _parse_time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r} is no time with a time zone; write 2030-01-31T12:00:00Z")
