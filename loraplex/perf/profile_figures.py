"""A few figures of a profile to compare engines by, the same for both kinds of engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loraplex.core.modules import GROUPS
from loraplex.perf.cost_model import CostModel
from loraplex.perf.engine_memory import EngineMemory
from loraplex.perf.named_profiles import Profile
from loraplex.perf.set_costs import RequestSets, SetCosts, SlotSetCosts, StepSetCosts
from loraplex.perf.slot_profile import SlotProfile

BATCHES: Final = (1, 8, 32, 128)
RANK: Final = 64
SMALL_RANK: Final = 8
CONTEXT: Final = 512
"""Context of each request, in tokens."""
PROMPT: Final = 1024
MODULES: Final = GROUPS["qkv"]
"""Modules of our own engine's adapters; a profile of a slot engine does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeFigures:
    """Seconds of a decode step. `base_s`: on the base model. `lora_s`: each request on its own adapter, all
    of `RANK`. `mixed_s`: the same, half of them of `SMALL_RANK`. None if memory does not hold them, the
    profile does not say how large adapters are, or there is only one request to mix."""

    num_requests: int
    base_s: float
    lora_s: float | None
    mixed_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFigures:
    """Figures of a profile. `prefill_tok_s`: tokens per second of one prompt of `PROMPT` tokens on the base
    model, `prefill_lora_tok_s`: on an adapter. `kv_tokens`: without adapters; `adapter_tokens`: KV tokens
    that an adapter displaces, zero if memory is not shared. `load_s`: load of an adapter from host memory,
    None if it is used from there; `first_load_s`: load from a file. All adapters are of `RANK`; None if the
    profile does not say."""

    decodes: tuple[DecodeFigures, ...]
    prefill_tok_s: float
    prefill_lora_tok_s: float | None
    kv_tokens: int | None
    adapter_tokens: int | None
    load_s: float | None
    first_load_s: float | None


def figures_of(profile: Profile) -> ProfileFigures:
    """Return the profile's figures of steps, memory and loads."""
    return _of_ours(profile) if isinstance(profile, CostModel) else _of_slots(profile)


def _of_ours(profile: CostModel) -> ProfileFigures:
    memory = profile.memory
    rank_bytes = 0 if memory is None else memory.bytes_per_rank(MODULES)
    costs = StepSetCosts(profile, rank_bytes=rank_bytes, prompt_positions=PROMPT / 2)
    decodes = tuple(
        DecodeFigures(
            num_requests=number,
            base_s=_decode_s(costs, [0] * number),
            lora_s=_decode_s(costs, [RANK] * number) if _holds(memory, number) else None,
            mixed_s=_decode_s(costs, _mixed(number)) if _holds(memory, number) and number > 1 else None,
        )
        for number in BATCHES
    )
    num_bytes = 0 if memory is None else memory.adapter_bytes(RANK, MODULES)
    is_apart = memory is None or memory.arena_bytes is None
    return ProfileFigures(
        decodes=decodes,
        prefill_tok_s=_prefill_tok_s(costs, 0),
        prefill_lora_tok_s=None if memory is None else _prefill_tok_s(costs, RANK),
        kv_tokens=None if memory is None else _kv_tokens(memory),
        adapter_tokens=None if memory is None else 0 if is_apart else -(-num_bytes // memory.token_bytes),
        load_s=None if memory is None or profile.bus is None else profile.copy_s(num_bytes),
        first_load_s=None if memory is None else profile.read_s(num_bytes) + profile.copy_s(num_bytes),
    )


def _of_slots(profile: SlotProfile) -> ProfileFigures:
    """Return the figures with one slot of `RANK` for each adapter, and no others."""
    base = SlotSetCosts(profile.costs, num_slots=0, max_rank=0)

    def lora_s(ranks: Sequence[int]) -> float | None:
        number = len(ranks)
        if profile.memory.predict(num_slots=number, max_rank=RANK) < number * CONTEXT:
            return None
        return _decode_s(SlotSetCosts(profile.costs, num_slots=number, max_rank=RANK), ranks)

    decodes = tuple(
        DecodeFigures(
            num_requests=number,
            base_s=_decode_s(base, [0] * number),
            lora_s=lora_s([RANK] * number),
            mixed_s=lora_s(_mixed(number)) if number > 1 else None,
        )
        for number in BATCHES
    )
    memory, load = profile.memory, profile.costs.load
    return ProfileFigures(
        decodes=decodes,
        prefill_tok_s=_prefill_tok_s(base, 0),
        prefill_lora_tok_s=_prefill_tok_s(SlotSetCosts(profile.costs, num_slots=1, max_rank=RANK), RANK),
        kv_tokens=memory.predict(num_slots=0, max_rank=0),
        adapter_tokens=round(memory.slot_tokens + memory.slot_rank_tokens * RANK),
        load_s=load.predict(rank=RANK, from_disk=False),
        first_load_s=load.predict(rank=RANK, from_disk=True),
    )


def _mixed(number: int) -> list[int]:
    return [RANK, SMALL_RANK] * (number // 2)


def _kv_tokens(memory: EngineMemory) -> int:
    if memory.kv_tokens is not None:
        return memory.kv_tokens
    assert memory.arena_bytes is not None
    block_bytes = memory.token_bytes * memory.block_tokens
    return memory.arena_bytes // block_bytes * memory.block_tokens


def _holds(memory: EngineMemory | None, number: int) -> bool:
    """Return whether this many requests fit, each with its own adapter."""
    if memory is None:
        return False
    kv_bytes, adapter_bytes = (
        number * CONTEXT * memory.token_bytes,
        number * memory.adapter_bytes(RANK, MODULES),
    )
    if memory.arena_bytes is not None:
        return kv_bytes + adapter_bytes <= memory.arena_bytes
    return number * CONTEXT <= _kv_tokens(memory) and adapter_bytes <= memory.host_bytes


def _decode_s(costs: SetCosts, ranks: Sequence[int]) -> float:
    [seconds] = costs.decode_s(_set_of(ranks, prompt_tokens=0))
    return float(seconds)


def _prefill_tok_s(costs: SetCosts, rank: int) -> float:
    [seconds] = costs.prefill_s(_set_of([rank], prompt_tokens=PROMPT))
    return PROMPT / float(seconds)


def _set_of(ranks: Sequence[int], *, prompt_tokens: int) -> RequestSets:
    """Return one set; a request of rank 0 is for the base model, each of the others has its own adapter."""
    figures = (
        len(ranks),
        sum(ranks),
        max(ranks),
        prompt_tokens,
        len(ranks) * CONTEXT,
        sum(rank > 0 for rank in ranks),
    )
    return RequestSets(*(np.array([each], np.int64) for each in figures))
