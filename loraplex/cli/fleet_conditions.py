"""The conditions of a simulated fleet, for the JSON files of `loraplex fleet`."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.twin.fleet_compare import FleetInputs


def conditions_of(profile: Path, workload: Path, inputs: FleetInputs) -> dict[str, Any]:
    """Return the version of loraplex, the profile, the workload, the fleet and the SLO. `profile` and
    `workload` are as given by the user; `inputs` was read from them."""
    from loraplex import __version__
    from loraplex.cli.profile_show import facts_of

    options, replay, slo = inputs.options, inputs.options.replay, inputs.options.slo
    facts = facts_of(str(profile), inputs.profile)
    del facts["mean_error"]
    return {
        "loraplex_version": __version__,
        "profile": {**facts, "sha256": _sha256_of(profile)},
        "workload": {
            "path": str(workload),
            "sha256": _sha256_of(workload),
            "num_requests": len(inputs.workload),
            "num_adapters": replay.num_adapters,
            "adapters_by_rank": _adapters_by_rank(replay.ranks, replay.num_adapters),
        },
        "num_replicas": options.num_replicas,
        "period_s": options.period_s,
        "link_bytes_per_s": None if options.link is None else options.link.bytes_per_s,
        "num_slots": replay.num_slots,
        "kv_tokens": replay.kv_tokens,
        "adapter_bytes": replay.adapter_bytes if options.adapter_bytes is None else options.adapter_bytes,
        "modules": None if replay.modules is None else list(replay.modules),
        "max_running": replay.max_running,
        "batching": replay.batching,
        "max_delay": asdict(replay.max_delay) if replay.batching.groups else None,
        "tenants": [asdict(each) for each in replay.tenants],
        "max_borrowing": replay.max_borrowing,
        "max_ttft_s": replay.max_ttft_s,
        "seconds": None if replay.until_s == math.inf else replay.until_s,
        "slo_tpt_s": slo.tpt_s,
        "slo_tpot_s": slo.tpot_s,
        "slo_ttft_s": slo.ttft_s,
        "costs": str(options.cost_form),
        "warm": options.warm,
    }


def _adapters_by_rank(ranks: tuple[int, ...], num_adapters: int) -> dict[int, int]:
    """Return how many adapters have each rank. `ranks` are assigned to adapters in turn."""
    num_rounds, num_left = divmod(num_adapters, len(ranks))
    whole, rest = Counter(ranks), Counter(ranks[:num_left])
    counts = {rank: whole[rank] * num_rounds + rest[rank] for rank in sorted(whole)}
    return {rank: count for rank, count in counts.items() if count}


def _sha256_of(path: Path) -> str | None:
    """Return the hash of a file; None for a profile of the package, or a pipe, which can be read only
    once."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
