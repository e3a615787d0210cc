"""Engines with random weights, and adapters that show: each with a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from benchmarks.correctness.check import Setting, release
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, random_specs
from loraplex.core.errors import CapacityError
from loraplex.engine.core import Engine

_MAX_TRIALS: Final = 40


def build(shape: str, setting: Setting, memory_fraction: float) -> Engine:
    return build_random_engine(
        RandomEngineOptions(
            shape=shape,
            device=setting.device,
            dtype=setting.engine_dtype,
            memory_fraction=memory_fraction,
        )
    )


def build_with_room(shape: str, setting: Setting, adapter_bytes: int) -> Engine:
    """An engine whose memory holds about that many bytes of adapters.

    A fraction of a device is a coarse measure for little memory: it is found by halving.
    """
    low, high = 0.0, 0.9
    for _ in range(_MAX_TRIALS):
        fraction = (low + high) / 2
        engine = _try_build(shape, setting, fraction)
        room = 0 if engine is None else engine.stats().host_adapter_budget_bytes
        if engine is not None and adapter_bytes <= 1.5 * room <= 2.25 * adapter_bytes:
            return engine
        if engine is not None:
            engine.close()
        del engine
        release()
        low, high = (fraction, high) if room < adapter_bytes else (low, fraction)
    raise CapacityError(f"no fraction of the memory gives adapters about {adapter_bytes:,} bytes")


def _try_build(shape: str, setting: Setting, fraction: float) -> Engine | None:
    try:
        return build(shape, setting, fraction)
    except CapacityError:  # not even one context
        return None


def distinct_specs(
    name: str, shape: str, *, num_adapters: int, ranks: Sequence[int], modules: str
) -> list[AdapterSpec]:
    """Random adapters of one size share their weights on the host; scales tell them apart.

    With rank r, the weights' spread and these scales, adapters change the outputs of the linears by a good
    part of their size: an adapter that is mistaken for another changes every text.
    """
    specs = random_specs(name, shape, num_adapters=num_adapters, ranks=ranks, modules=modules)
    return [
        replace(
            spec,
            modules=tuple(
                replace(lora, scale=(1 - 2 * (index % 2)) * (1 + index / num_adapters) * 16 / lora.rank**0.5)
                for lora in spec.modules
            ),
        )
        for index, spec in enumerate(specs)
    ]
