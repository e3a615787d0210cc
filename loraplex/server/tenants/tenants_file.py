"""The tenants file: TOML, read strictly. Nothing of a file with a mistake in it is used.

share_prefix_cache = false

[tenants.acme]
keys = ["sha256:3f...", "sha256:77... until 2030-01-31T12:00:00Z"]
adapters = ["acme-*"]
requests_per_minute = 600

[adapters."acme-chat"]
slo_ttft = 0.5
"""

from __future__ import annotations

import difflib
import math
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from loraplex.adapters.allowed_paths import AllowedPaths
from loraplex.adapters.remote import AllowedSources
from loraplex.core.errors import LoraplexError, UserError
from loraplex.core.tenants import MAX_TENANT_CHARS, TENANT_NAMES, TenantPolicy, is_tenant_name
from loraplex.server.durations import DURATION_FORM, duration_s
from loraplex.server.tenants.account import Limits
from loraplex.server.tenants.keys import KeyRing, StoredKey
from loraplex.server.tenants.patterns import Patterns, why_no_pattern

_MAX_BYTES: Final = 16 * 2**20
_MOST: Final = 10**12
_LOCATION: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_S = TypeVar("_S", bound=msgspec.Struct)

Count = Annotated[int, Meta(ge=1, le=_MOST)]
Positive = Annotated[float, Meta(gt=0.0, le=1e6)]


class TenantsFileError(UserError):
    """The tenants file cannot be used; the message names the file, the place and the fix."""


class AdapterSlo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[adapters.NAME]`: the time within which its first token and each later one should come, in seconds.
    Files have it as a text such as `500ms`, too."""

    slo_ttft: Positive | None = None
    slo_tpt: Positive | None = None


class TenantTable(AdapterSlo, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tenants.NAME]`. `adapters`, `administers`: patterns of adapters that it may use, and may load and
    unload. `load_from`: folders and patterns of repositories that it may load from. `operator`: may do
    everything. `metrics`: may read all of /metrics."""

    keys: list[str] = []
    adapters: list[str] = []
    base_model: bool = True
    administers: list[str] = []
    load_from: list[str] = []
    operator: bool = False
    metrics: bool = False
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_in_flight: Count | None = None
    share: Positive = 1.0
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0


class LoadSources:
    """The folders and remote sources that a tenant may load adapters from."""

    def __init__(self, folders: Sequence[str], remote: AllowedSources) -> None:
        self._folders = folders
        self.remote = remote

    @cached_property
    def paths(self) -> AllowedPaths:
        """The folders, looked up on the disk when they are first needed."""
        return AllowedPaths(map(Path, self._folders))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """One tenant's rights, as the file has them."""

    name: str
    policy: TenantPolicy
    keys: tuple[StoredKey, ...]
    limits: Limits
    adapters: Patterns
    administers: Patterns
    sources: LoadSources
    uses_base: bool
    is_operator: bool
    reads_metrics: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsFile:
    """All tenants, and the targets of adapters that have some of their own, by name. `owners`: the names of
    tenants by their keys."""

    tenants: Mapping[str, Tenant]
    adapter_slos: Mapping[str, AdapterSlo]
    owners: KeyRing[str]
    shares_prefix_cache: bool


def read_text(path: Path) -> str:
    """Return a tenants file's text. Raises TenantsFileError."""
    try:
        # Without blocking: opening a pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TenantsFileError(f"{path} is not a file; name the file with the tenants")
            data = _read_up_to(descriptor, _MAX_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > _MAX_BYTES:
            raise TenantsFileError(f"{path} has more than {_MAX_BYTES:,} bytes; that is no tenants file")
        return data.decode()
    except FileNotFoundError:
        raise TenantsFileError(
            f"there is no tenants file {path}; make one with: loraplex tenant add NAME --tenants {path}"
        ) from None
    except UnicodeDecodeError as error:
        raise TenantsFileError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise TenantsFileError(
            f"{path} cannot be read ({error.strerror}); let this process read it"
        ) from error


def _read_up_to(descriptor: int, num_bytes: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read(num_bytes)


def parse_tenants(text: str, path: Path) -> TenantsFile:
    """Return the tenants of a file's text. Raises TenantsFileError."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of an integer with thousands of digits
        raise TenantsFileError(f"{path} is not valid TOML: {error}") from None
    _refuse_unknown(data, ("tenants", "adapters", "share_prefix_cache"), f"{path}")
    shares = data.get("share_prefix_cache", False)
    if not isinstance(shares, bool):
        raise TenantsFileError(f"{path}: share_prefix_cache is neither true nor false; write one of them")
    tables, slo_tables = (_tables(data, kind, path) for kind in ("tenants", "adapters"))
    tenants = {name: tenant_of(name, table, path) for name, table in tables.items()}
    _refuse_twins(tenants.values(), path)
    slos = {
        name: _convert(table, AdapterSlo, f"{path}: [adapters.{name}]") for name, table in slo_tables.items()
    }
    return TenantsFile(
        tenants=tenants,
        adapter_slos=slos,
        owners=KeyRing((key, tenant.name) for tenant in tenants.values() for key in tenant.keys),
        shares_prefix_cache=shares,
    )


def _check_name(name: str, where: str) -> None:
    if not is_tenant_name(name):
        raise TenantsFileError(
            f"{where}: {name[:MAX_TENANT_CHARS]!r} cannot be a tenant's name; use {TENANT_NAMES}"
        )


def _tables(data: Mapping[str, Any], kind: str, path: Path) -> dict[str, dict[str, Any]]:
    found = data.get(kind, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise TenantsFileError(f"{path}: {kind!r} must hold tables, one for each name, as [{kind}.NAME]")
    return found


def tenant_of(name: str, data: dict[str, Any], path: Path) -> Tenant:
    """Return the tenant of one table. Raises TenantsFileError."""
    where = f"{path}: [tenants.{name}]"
    _check_name(name, str(path))
    table = _convert(data, TenantTable, where)
    for option, patterns in (("adapters", table.adapters), ("administers", table.administers)):
        for text in patterns:
            if (why := why_no_pattern(text)) is not None:
                raise TenantsFileError(f"{where} {option}: {why}")
    try:
        keys = tuple(StoredKey.parse(text) for text in table.keys)
    except ValueError as error:
        raise TenantsFileError(f"{where} keys: {error}") from None
    return Tenant(
        name=name,
        policy=TenantPolicy(
            name=name,
            share=table.share,
            priority=table.priority,
            slo_ttft=table.slo_ttft,
            slo_tpt=table.slo_tpt,
        ),
        keys=keys,
        limits=Limits(
            requests_per_minute=table.requests_per_minute,
            tokens_per_minute=table.tokens_per_minute,
            max_in_flight=table.max_in_flight,
        ),
        adapters=Patterns(table.adapters),
        administers=Patterns(table.administers),
        sources=_sources(table.load_from, where),
        uses_base=table.base_model,
        is_operator=table.operator,
        reads_metrics=table.metrics or table.operator,
    )


def _sources(load_from: list[str], where: str) -> LoadSources:
    """Return the folders, which are absolute, and the patterns of remote sources."""
    folders = [text for text in load_from if text.startswith("/")]
    try:
        if any("\0" in folder for folder in folders):
            raise ValueError
        return LoadSources(folders, AllowedSources(text for text in load_from if not text.startswith("/")))
    except (LoraplexError, ValueError):
        raise TenantsFileError(
            f"{where} load_from: write folders from the root on, as /srv/adapters/acme, repositories as "
            "owner/name or owner/*, and buckets as s3://bucket/prefix/*"
        ) from None


def _in_seconds(data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a table with its times as numbers."""
    found = dict(data)
    for option in AdapterSlo.__struct_fields__:
        if isinstance(text := data.get(option), str):
            found[option] = duration_s(text)
            if found[option] is None:
                raise TenantsFileError(f"{where} {option}: {text[:64]!r} is no time; {DURATION_FORM}")
    return found


def _convert(data: dict[str, Any], kind: type[_S], where: str) -> _S:
    _refuse_unknown(data, kind.__struct_fields__, where)
    for option, value in data.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise TenantsFileError(f"{where} {option}: {value} is no amount; write a number, or leave it out")
    try:
        return msgspec.convert(_in_seconds(data, where), kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = _LOCATION.search(message)
        option = f" {found[1]}" if found else ""
        raise TenantsFileError(f"{where}{option}: {_LOCATION.sub('', message)}; correct it") from None


def _refuse_unknown(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for option in data:
        if option not in known:
            near = difflib.get_close_matches(option[:MAX_TENANT_CHARS], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            raise TenantsFileError(f"{where}: there is no option {option[:MAX_TENANT_CHARS]!r}; {hint}")


def _refuse_twins(tenants: Iterable[Tenant], path: Path) -> None:
    """Refuse names that differ in case only, and keys that two tenants have."""
    names: dict[str, str] = {}
    owners: dict[bytes, str] = {}
    for tenant in tenants:
        twin = names.setdefault(tenant.name.lower(), tenant.name)
        if twin != tenant.name:
            raise TenantsFileError(
                f"{path}: the tenants {twin!r} and {tenant.name!r} differ in case only; rename one of them"
            )
        for key in tenant.keys:
            owner = owners.get(key.digest)
            if owner is not None:
                raise TenantsFileError(
                    f"{path}: [tenants.{owner}] and [tenants.{tenant.name}] have the same key "
                    f"(sha256:{key.digest.hex()[:12]}...); remove one of them"
                )
            owners[key.digest] = tenant.name
