"""Restore the canaries that the registry remembers from an earlier server."""

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
    """A canary that is not served here. `is_over`: its trial ends; otherwise the registry keeps it, and it is
    tried again."""

    name: str
    canary: Canary
    reason: str
    is_over: bool

    @property
    def kept(self) -> Canary | None:
        """The canary that the registry keeps; None if the trial is over."""
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
    """Serve canaries beside the versions that their names stand for; return those that cannot be served, by
    name.

    Their files are read again and must be unchanged: a trial is of a version, not of a folder. If they cannot
    be read and no other server uses the registry (which might have them), the trial is over. A canary that
    only the engine refuses stays on trial: this engine may accept it later, and another server's may now.
    """
    missing = {}
    for name, canary in canaries.items():
        adapter = service.find(name)
        assert adapter is not None, "the names of adapters are not the base model's"
        if adapter.version == canary.ref.version:
            continue  # the stable version now has the canary's files
        found: ReadAdapter | None = None
        try:
            found = await service.files.read_again(canary.ref)
            trial = ServedCanary(adapter=found, share=canary.share)
            await service.adopt(replace(adapter, canary=trial))
        except (UserError, CapacityError) as error:
            is_over = found is None and not await asyncio.to_thread(lambda: service.registry.other_servers)
            missing[name] = MissingCanary(name=name, canary=canary, reason=str(error), is_over=is_over)
    return missing
