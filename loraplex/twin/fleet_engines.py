"""The engines of a simulated fleet, and what its policies know about them, by the kind of profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from loraplex.core.errors import UserError
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.load import ReplicaLimits
from loraplex.fleet.view import AdapterMoves
from loraplex.perf.cost_model import CostModel, KernelKind
from loraplex.perf.named_profiles import Profile
from loraplex.perf.serving_costs import AdapterLoadCost
from loraplex.perf.set_costs import CostForm, SetCosts, SlotSetCosts, StepSetCosts, linear_costs
from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.engine_twin import Engines
from loraplex.twin.links import LinkSpeed
from loraplex.twin.replay import OwnEngines, ReplayOptions

_UNBOUNDED: Final = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetEngines:
    """Engines and their properties. `pads`: kernels compute every adapter with the largest rank.
    `host_bytes`, `device_bytes`: memory for adapters on each replica, None without such a limit.
    `knows_sizes`: whether the sizes of adapters are known."""

    engines: Engines[Any]
    adapters: AdapterSizes
    limits: ReplicaLimits
    costs: SetCosts
    moves: AdapterMoves
    pads: bool
    host_bytes: int | None = None
    device_bytes: int | None = None
    knows_sizes: bool = True


def fleet_engines(
    profile: Profile,
    options: ReplayOptions,
    *,
    longest: int,
    link: LinkSpeed | None = None,
    adapter_bytes: int | None = None,
    cost_form: CostForm = CostForm.STEPS,
) -> FleetEngines:
    """Return engines for requests of at most `longest` tokens. `adapter_bytes`: size of each adapter, for
    engines with slots, whose profile does not contain it. `cost_form`: form of the costs that policies use;
    simulated steps always take the profile's times."""
    if isinstance(profile, SlotProfile):
        found = _with_slots(profile, options, longest, link, adapter_bytes)
    else:
        found = _ours(profile, options, longest, link)
    if cost_form is CostForm.STEPS:
        return found
    return replace(found, costs=linear_costs(found.costs, padded=found.pads))


def _ours(profile: CostModel, options: ReplayOptions, longest: int, link: LinkSpeed | None) -> FleetEngines:
    host_bytes = options.host_memory
    if link is not None:
        # The pool decides what a host holds: the limit of the engine's own host tier must not interfere.
        options = replace(options, host_memory=_UNBOUNDED)
    engines = OwnEngines(profile, options, longest=longest)
    memory = profile.memory
    assert memory is not None, "engines were made by it"
    return FleetEngines(
        engines=engines,
        adapters=AdapterSizes.of(ranks=engines.ranks, num_bytes=engines.sizes),
        limits=ReplicaLimits(max_running=engines.max_running, kv_tokens=engines.kv_tokens),
        costs=StepSetCosts(profile, rank_bytes=engines.rank_bytes),
        moves=_ModelMoves(profile, engines.sizes, link),
        pads=profile.kernels is KernelKind.PADDED,
        host_bytes=host_bytes or memory.host_bytes,
        device_bytes=memory.arena_bytes,
    )


def _with_slots(
    profile: SlotProfile,
    options: ReplayOptions,
    longest: int,
    link: LinkSpeed | None,
    adapter_bytes: int | None,
) -> FleetEngines:
    from loraplex.twin.slot_engines import SlotEngines

    if link is not None and adapter_bytes is None:
        raise UserError(
            "the profile is of an engine with slots, and does not say how large adapters are that a link is "
            "to carry; give --adapter-mib, or leave --link out"
        )
    engines = SlotEngines(profile, options, longest=longest, adapter_bytes=adapter_bytes or 1)
    return FleetEngines(
        engines=engines,
        adapters=AdapterSizes.of(ranks=engines.ranks, num_bytes=engines.sizes),
        limits=ReplicaLimits(
            max_running=engines.max_running, kv_tokens=engines.kv_tokens, max_adapters=engines.num_slots
        ),
        costs=SlotSetCosts(profile.costs, num_slots=engines.num_slots, max_rank=engines.slot_rank),
        moves=_SlotMoves(profile.costs.load, engines.ranks, engines.sizes, link),
        pads=True,
        knows_sizes=adapter_bytes is not None,
    )


class _ModelMoves:
    """Load times of adapters by the cost model: over a link, or from a file in the page cache."""

    def __init__(self, model: CostModel, num_bytes: Sequence[int], link: LinkSpeed | None) -> None:
        self._model = model
        self._bytes = num_bytes
        self._elsewhere_s: Callable[[int], float] = model.read_s if link is None else link.seconds

    def from_host_s(self, adapter: int) -> float:
        return self._model.copy_s(self._bytes[adapter])

    def from_elsewhere_s(self, adapter: int) -> float:
        return self._elsewhere_s(self._bytes[adapter])


class _SlotMoves:
    """Load times of adapters into slots: over a link, or from disk as in the profile."""

    def __init__(
        self, cost: AdapterLoadCost, ranks: Sequence[int], num_bytes: Sequence[int], link: LinkSpeed | None
    ) -> None:
        self._cost = cost
        self._ranks = ranks
        self._bytes = num_bytes
        self._link = link

    def from_host_s(self, adapter: int) -> float:
        return self._cost.predict(rank=self._ranks[adapter], from_disk=False)

    def from_elsewhere_s(self, adapter: int) -> float:
        if self._link is not None:
            return self._link.seconds(self._bytes[adapter])
        return self._cost.disk_s + self._cost.disk_rank_s * self._ranks[adapter]
