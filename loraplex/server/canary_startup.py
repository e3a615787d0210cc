"""The versions on trial that a server begins with: those that the registry remembers of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loraplex.adapters.rollout import Canary
from loraplex.core.errors import CapacityError, UserError
from loraplex.server.adapter_service import AdapterService
from loraplex.server.served_adapter import ServedCanary


async def restore_canaries(service: AdapterService, canaries: Mapping[str, Canary]) -> list[str]:
    """Put canaries beside the versions that their names stand for; returns a note on each that cannot be.

    Their files are read again, and must be the same: what is on trial is a version and no folder.
    """
    notes = []
    for name, canary in canaries.items():
        adapter = service.find(name)
        assert adapter is not None, "the names of adapters are not the base model's"
        if adapter.version == canary.ref.version:
            continue  # its files came in place of those it was tried beside
        try:
            found = await service.files.read_again(canary.ref)
            trial = ServedCanary(adapter=found, share=canary.share)
            await service.adopt(replace(adapter, canary=trial))
        except (UserError, CapacityError) as error:
            notes.append(
                f"adapter {name!r}: its canary, which had a share of {canary.share:g}, is gone: {error}"
            )
    return notes
