"""Section `burst`: as many requests as adapters, all at once, with memory for a part of the adapters."""

from __future__ import annotations

from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, holds, within
from benchmarks.correctness.comparing import alone_check
from benchmarks.correctness.driving import Answer, answers, greedy_request, random_prompt
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.core.request import FinishReason
from loraplex.core.stats import EngineStats
from loraplex.model.shapes import config_of_shape
from loraplex.scheduling.adapter_table import State
from loraplex.scheduling.config import SchedulerConfig

ROOM: Final = 0.4
"""The engine's memory, as a part of what all adapters would take."""
COMPARED_EVERY: Final = 10
TIE: Final = 1e-3
"""Log-probabilities that differ by less are a tie, in float32: in bfloat16, rounding alone makes other texts
of most requests, as the section `batch` shows."""


def burst(setting: Setting) -> list[Check]:
    shape, rank = setting.large_shape, 16 if setting.tiny else 64
    num_adapters, prompt_tokens, num_tokens = (24, 20, 4) if setting.tiny else (500, 64, 32)
    specs = distinct_specs("burst", shape, num_adapters=num_adapters, ranks=[rank], modules="q,k,v")
    num_bytes = sum(spec.num_params for spec in specs) * torch.float32.itemsize
    engine = build(shape, setting, int(num_bytes * ROOM), torch.float32)
    for spec in specs:
        engine.add_adapter(spec)
    vocab_size = config_of_shape(shape).shape.vocab_size
    requests = [
        greedy_request(str(index), random_prompt(prompt_tokens, vocab_size, index), num_tokens, spec.version)
        for index, spec in enumerate(specs)
    ]
    ended = answers(engine, requests)
    stats = engine.stats()
    engine.close()
    del engine
    release()
    return [
        _answered(ended, num_adapters, num_tokens),
        _limited(stats),
        _in_order(list(ended)),
        # Adapters that were mixed up, or overwritten, have no likely token in common.
        alone_check(
            build(shape, setting, None, torch.float32),
            "of them",
            [
                (request, spec, ended[request.request_id].token_ids)
                for request, spec in list(zip(requests, specs, strict=True))[::COMPARED_EVERY]
            ],
            TIE,
        ),
    ]


def _answered(ended: dict[str, Answer], num_requests: int, num_tokens: int) -> Check:
    whole = [
        answer
        for answer in ended.values()
        if answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) == num_tokens
    ]
    errors = sorted({answer.error for answer in ended.values() if answer.error is not None})
    return holds(
        "answers",
        f"{num_requests} requests on as many adapters, handed over at once: all get all their tokens",
        len(whole) == num_requests,
        requests=num_requests,
        answered_in_full=len(whole),
        errors=errors[:3],
    )


def _limited(stats: EngineStats) -> Check:
    num_loads = sum(adapter.loads for adapter in stats.adapters)
    # Those that left a device stay in the host's memory.
    used_from = State.DEVICE if stats.device_arena_bytes else State.HOST
    num_resident = sum(adapter.tier == used_from for adapter in stats.adapters)
    return holds(
        "memory",
        "not all adapters fit, so that some had to leave for others",
        num_loads > num_resident,
        adapter_bytes=sum(adapter.num_bytes for adapter in stats.adapters),
        adapter_budget_bytes=stats.device_arena_bytes or stats.host_adapter_budget_bytes,
        loads=num_loads,
        evictions=num_loads - num_resident,
        preemptions=stats.num_preemptions,
        steps=stats.num_steps,
    )


def _in_order(order: list[str]) -> Check:
    """Requests are numbered as they came. While one waits for its adapter, those behind it whose adapters are
    there go first: no more of them than adapters are brought in for at a time."""
    ahead = [int(name) - place for place, name in enumerate(order)]
    return within(
        "order",
        "requests of equal length: places that the unluckiest lost between coming and ending",
        -min(ahead),
        SchedulerConfig(max_model_len=1).prefetch_depth,
        most_places_gained=max(ahead),
    )
