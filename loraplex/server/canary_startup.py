"""The versions on trial that a server begins with: those that the registry remembers of an earlier one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loraplex.adapters.rollout import Canary
from loraplex.core.errors import CapacityError, UserError
from loraplex.server.adapter_files import ReadAdapter
from loraplex.server.adapter_service import AdapterService
from loraplex.server.served_adapter import ServedCanary


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingCanary:
    """A canary that is not served here. `is_over`: its trial ends; else the registry keeps it, and it is
    tried again."""

    name: str
    canary: Canary
    reason: str
    is_over: bool

    @property
    def kept(self) -> Canary | None:
        """The canary that the registry keeps."""
        return None if self.is_over else self.canary

    @property
    def note(self) -> str:
        outcome = "is gone" if self.is_over else "is not served here, and is tried again from time to time"
        return (
            f"adapter {self.name!r}: its canary, which had a share of {self.canary.share:g}, {outcome}: "
            f"{self.reason}"
        )


async def restore_canaries(
    service: AdapterService, canaries: Mapping[str, Canary]
) -> dict[str, MissingCanary]:
    """Put canaries beside the versions that their names stand for; returns those that cannot be, by name.

    Their files are read again, and must be the same: what is on trial is a version and no folder. The trial
    is over where they are not and no other server runs on the registry, which may have them. What only the
    engine refuses stays on trial: it may take it later, and engines of other servers may take it now.
    """
    missing = {}
    for name, canary in canaries.items():
        adapter = service.find(name)
        assert adapter is not None, "the names of adapters are not the base model's"
        if adapter.version == canary.ref.version:
            continue  # its files came in place of those it was tried beside
        found: ReadAdapter | None = None
        try:
            found = await service.files.read_again(canary.ref)
            trial = ServedCanary(adapter=found, share=canary.share)
            await service.adopt(replace(adapter, canary=trial))
        except (UserError, CapacityError) as error:
            is_over = found is None and not await asyncio.to_thread(lambda: service.registry.other_servers)
            missing[name] = MissingCanary(name=name, canary=canary, reason=str(error), is_over=is_over)
    return missing
