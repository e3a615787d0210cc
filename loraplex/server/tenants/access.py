"""The rights of the sender of a request: to see, use and change."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from starlette.types import Scope

from loraplex.core.tenants import NO_TENANT
from loraplex.server.tenants.account import Account
from loraplex.server.tenants.objective import Objective
from loraplex.server.tenants.tenants_file import AdapterSlo, LoadSources, Tenant

_STATE_KEY: Final = "loraplex.access"


class Access:
    """The rights of one tenant. `account`: counts what it uses; None for an admin key of the server.
    `cache_salt`: see EngineRequest. `slos`: the targets of adapters."""

    def __init__(
        self,
        tenant: Tenant | None,
        account: Account | None,
        *,
        cache_salt: str = "",
        slos: Mapping[str, AdapterSlo] = MappingProxyType({}),
    ) -> None:
        self._tenant = tenant
        self._slos = slos
        self.account = account
        self.cache_salt = cache_salt

    @property
    def tenant(self) -> str:
        """The tenant's name; empty without one."""
        return NO_TENANT if self._tenant is None else self._tenant.name

    @property
    def is_operator(self) -> bool:
        """Return whether it may see and change everything."""
        return self._tenant is None or self._tenant.is_operator

    @property
    def reads_metrics(self) -> bool:
        """Return whether it may read the whole of /metrics."""
        return self._tenant is None or self._tenant.reads_metrics

    @property
    def uses_base(self) -> bool:
        """Return whether it may send requests to the base model."""
        return self._tenant is None or self._tenant.uses_base or self._tenant.is_operator

    @property
    def sources(self) -> LoadSources | None:
        """The places it may load adapters from; None for all that the server has opened."""
        return None if self._tenant is None or self._tenant.is_operator else self._tenant.sources

    @property
    def is_administrator(self) -> bool:
        """Return whether it may load and unload any adapters."""
        return self.is_operator or (self._tenant is not None and bool(self._tenant.administers))

    @property
    def administered(self) -> tuple[str, ...]:
        """Patterns of the adapters that it may load and unload."""
        return ("*",) if self._tenant is None or self.is_operator else self._tenant.administers.texts

    def slos_of(self, adapter: str | None) -> tuple[float | None, float | None]:
        """Return the targets of an adapter, for the first token and for each later one; None for those that
        it has not of its own."""
        slo = None if adapter is None else self._slos.get(adapter)
        return (None, None) if slo is None else (slo.slo_ttft, slo.slo_tpt)

    def objective(self, adapter: str | None) -> Objective | None:
        """Return the targets of a request, those of its adapter before those of its tenant; None if there are
        none, or if nobody's requests are counted."""
        if self._tenant is None or self.account is None:
            return None
        policy, (ttft_s, tpt_s) = self._tenant.policy, self.slos_of(adapter)
        ttft_s = policy.slo_ttft if ttft_s is None else ttft_s
        tpt_s = policy.slo_tpt if tpt_s is None else tpt_s
        if ttft_s is None and tpt_s is None:
            return None
        return Objective(ttft_s, tpt_s, (self.account.num_reached,))

    def uses(self, adapter: str) -> bool:
        """Return whether it may send requests to an adapter."""
        return self._tenant is None or self._tenant.is_operator or self._tenant.adapters.match(adapter)

    def administers(self, adapter: str) -> bool:
        """Return whether it may load and unload an adapter."""
        return self._tenant is None or self._tenant.is_operator or self._tenant.administers.match(adapter)

    def sees(self, adapter: str) -> bool:
        """Return whether it may know that there is an adapter."""
        return self.uses(adapter) or self.administers(adapter)


UNRESTRICTED: Final = Access(None, None)
"""The access of every client of a server without tenants, as far as API and admin keys allow."""


def grant(scope: Scope, access: Access) -> None:
    """Record what the sender of a request may do."""
    scope.setdefault("state", {})[_STATE_KEY] = access


def access_of(scope: Scope) -> Access:
    """Return what the sender of a request may do."""
    access: Access = scope.get("state", {}).get(_STATE_KEY, UNRESTRICTED)
    return access
