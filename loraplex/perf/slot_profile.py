"""The profile of a slot engine (vLLM), on one machine with one model.

{"version": 1, "kind": "slots", "model": ..., "hardware": ..., "costs": {"decode": {...}, ...},
 "memory": {...}, "client": {...}, "units": {...}, "quality": {...}, "environment": {...}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from loraplex.core.errors import StorageError
from loraplex.core.whole_file import write_whole
from loraplex.perf.profile_json import JsonObject, ProfileError, unique_keys
from loraplex.perf.serving_costs import AdapterLoadCost, BatchDecode, Prefill, SchedulerCost, SlotMemory

VERSION: Final = 1
KIND: Final = "slots"
PARTS: Final[Mapping[str, Any]] = {
    "decode": BatchDecode,
    "prefill": Prefill,
    "load": AdapterLoadCost,
    "scheduler": SchedulerCost,
}
"""The parts of a step's costs, in the order of `SlotCosts.coefficients`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotCosts:
    """Seconds of a step: decoding or reading prompts, loads within it, and scheduling."""

    decode: BatchDecode
    prefill: Prefill
    load: AdapterLoadCost
    scheduler: SchedulerCost = field(default_factory=SchedulerCost)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """All coefficients of `decode`, `prefill`, `load`, `scheduler`, each in the order of its fields."""
        return tuple(
            getattr(getattr(self, name), each.name) for name, part in PARTS.items() for each in fields(part)
        )

    @property
    def without_reads(self) -> SlotCosts:
        """The same costs without reading adapters into host memory, if that is counted elsewhere."""
        return replace(self, load=replace(self.load, disk_s=0.0, disk_rank_s=0.0))

    @property
    def of_base_model(self) -> SlotCosts:
        """The costs of an engine that serves no adapters."""
        decode, prefill = self.decode, self.prefill
        return SlotCosts(
            decode=BatchDecode(
                base_s=decode.base_s, request_s=decode.request_s, kv_token_s=decode.kv_token_s
            ),
            prefill=Prefill(base_s=prefill.base_s, token_s=prefill.token_s),
            load=AdapterLoadCost(slot_s=0.0),
            scheduler=self.scheduler,
        )

    @classmethod
    def of_coefficients(cls, values: Sequence[float]) -> SlotCosts:
        """Invert `coefficients`."""
        left = list(values)
        made = {
            name: part(**{each.name: float(left.pop(0)) for each in fields(part)})
            for name, part in PARTS.items()
        }
        assert not left
        return cls(**made)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """Effects of the load generator. `latency_s`: added to the first token. `max_open`: most requests in
    flight; further ones are lost."""

    latency_s: float = 0.0
    max_open: int = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotProfile:
    """Costs and limits of a slot engine. `spare_share`: share of KV blocks that admission leaves free.
    `quality`: of the fit, by measure, for people."""

    model: str
    hardware: str
    costs: SlotCosts
    memory: SlotMemory
    client: ClientLimits = field(default_factory=ClientLimits)
    max_running: int = 2048
    max_step_tokens: int = 8192
    spare_share: float = 0.01
    quality: Mapping[str, float] = field(default_factory=dict)

    def spare_blocks(self, num_blocks: int) -> int:
        """Return how many of these blocks admission leaves free; at least one."""
        return max(int(self.spare_share * num_blocks), 1)


def slot_profile_to_json(profile: SlotProfile, environment: Mapping[str, Any] | None = None) -> str:
    document = {
        "version": VERSION,
        "kind": KIND,
        **asdict(profile),
        "quality": dict(profile.quality),
        "units": {**{name: part.UNITS for name, part in PARTS.items()}, "memory": SlotMemory.UNITS},
        "environment": dict(environment or {}),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def write_slot_profile(
    path: Path, profile: SlotProfile, environment: Mapping[str, Any] | None = None
) -> None:
    try:
        write_whole(path, slot_profile_to_json(profile, environment))
    except OSError as error:
        raise StorageError(f"{path}: the profile cannot be written ({error.strerror})") from error


def read_slot_profile(path: Path, model: str | None = None) -> SlotProfile:
    """Read a profile. `model`: the model it must have been fitted for. Raises ProfileError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        profile = _profile(JsonObject(document, "the profile"))
        if model is not None and profile.model != model:
            raise ValueError(f"it is of model {profile.model!r}, not {model!r}")
    except OSError as error:
        raise ProfileError(f"{path}: the profile cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: {error}; run `loraplex profile fit` again") from error
    return profile


def _profile(top: JsonObject) -> SlotProfile:
    if (version := top.take("version")) != VERSION:
        raise ValueError(f"its format is of version {version!r}, this loraplex reads version {VERSION}")
    if (kind := top.take("kind")) != KIND:
        raise ValueError(f"it is of kind {kind!r}, not of an engine with slots")
    costs = top.child("costs")
    found = {name: _numbers(costs.child(name), part) for name, part in PARTS.items()}
    costs.end()
    quality = top.child("quality")
    client = top.child("client")
    profile = SlotProfile(
        model=top.text("model"),
        hardware=top.text("hardware"),
        costs=SlotCosts(**found),
        memory=_numbers(top.child("memory"), SlotMemory),
        client=ClientLimits(latency_s=client.number("latency_s"), max_open=client.count("max_open")),
        max_running=top.count("max_running"),
        max_step_tokens=top.count("max_step_tokens"),
        spare_share=top.number("spare_share"),
        quality={name: quality.number(name) for name in quality.names},
    )
    client.end()
    for name in ("units", "environment"):
        top.child(name)
    top.end()
    return profile


def _numbers(found: JsonObject, part: Any) -> Any:
    """Read a part whose fields are all numbers."""
    made = part(**{each.name: found.number(each.name) for each in fields(part)})
    found.end()
    return made
