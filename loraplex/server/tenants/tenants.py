"""The tenants of a server: found by their keys, with their use, and replaced while requests run."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.core.clock import Clock
from loraplex.core.tenants import TenantPolicy
from loraplex.server.tenants.access import Access
from loraplex.server.tenants.account import Account
from loraplex.server.tenants.tenants_file import Tenant, TenantsFile


class Tenants:
    """`trouble`: why the file on disk is not in force; None if it is. `num_changes`: how often another file
    came into force."""

    def __init__(self, file: TenantsFile, clock: Clock) -> None:
        self._clock = clock
        # Also those of tenants that were removed: what they used stays used.
        self._accounts: dict[str, Account] = {}
        self.trouble: str | None = None
        self.num_changes = -1
        self.replace(file)

    def replace(self, file: TenantsFile) -> None:
        """Put a file in force, at once for new requests. Requests in flight go on."""
        self._file = file
        for name, account in self._accounts.items():
            if name in file.tenants:
                account.change(file.tenants[name].limits)
        self.num_changes += 1

    def find(self, key: bytes) -> Access | None:
        """Return what the holder of a key may do; None for an unknown key, or one that has expired."""
        name = self._file.owners.find(key)
        return None if name is None else self.access(name)

    def access(self, name: str) -> Access | None:
        """Return what a tenant may do; None if there is none of that name."""
        tenant = self._file.tenants.get(name)
        if tenant is None:
            return None
        shares = self._file.shares_prefix_cache
        salt = "" if shares else tenant.name
        return Access(tenant, self.account(tenant), cache_salt=salt, slos=self._file.adapter_slos)

    def account(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = Account(tenant.limits, self._clock)
        return account

    def all(self) -> Sequence[Tenant]:
        """Return the tenants, sorted by name."""
        return sorted(self._file.tenants.values(), key=lambda tenant: tenant.name)

    def policies(self) -> list[TenantPolicy]:
        """Return what decisions about requests depend on."""
        return [tenant.policy for tenant in self.all()]
