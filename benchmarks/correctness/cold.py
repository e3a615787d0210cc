"""Section `cold`: one text, however a request starts whose adapter is not on the device.

`cached` is what the others are compared with, in float32 and, on a GPU, in bfloat16. There, what rounding
cannot tell apart is measured as in the section `batch`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch

from benchmarks.correctness.check import Check, Setting, holds
from benchmarks.correctness.comparing import (
    FLOAT32_MARGIN,
    NOISE_FACTOR,
    NUM_TOP,
    logprob_error,
    rounding_error,
    text_and_logprob_checks,
)
from benchmarks.correctness.driving import Answer, answers, greedy_request, random_prompt
from benchmarks.correctness.random_engines import GPU_MEMORY_BYTES
from benchmarks.device_memory import release
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.adapter_files import save_random_adapters
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, register
from loraplex.core.cold_start import ColdStart
from loraplex.core.modules import MODULES
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape

NUM_WORKERS: Final = 4
SEED: Final = 5


class _Answers(NamedTuple):
    """The answers with one policy by request: without log-probabilities, and with them."""

    plain: dict[str, Answer]
    scored: dict[str, Answer]


def cold(setting: Setting) -> list[Check]:
    exact, base = _all_answers(setting, torch.float32)
    checks = [
        *_checks("float32", exact, FLOAT32_MARGIN),
        _shows("float32", exact[ColdStart.CACHED], base, FLOAT32_MARGIN),
    ]
    if setting.engine_dtype is torch.float32:
        return checks
    short, base = _all_answers(setting, setting.engine_dtype)
    alike = exact[ColdStart.CACHED].scored
    noise = max(rounding_error(short[ColdStart.CACHED].scored[name], one) for name, one in alike.items())
    margin = round(NOISE_FACTOR * noise, 3)
    return [
        *checks,
        *_checks("bfloat16", short, margin, rounding_error=round(noise, 3)),
        _shows("bfloat16", short[ColdStart.CACHED], base, margin),
    ]


def _all_answers(setting: Setting, dtype: torch.dtype) -> tuple[dict[ColdStart, _Answers], dict[str, Answer]]:
    """Return the answers by policy, and those to the same prompts without adapters."""
    on_gpu, shape = setting.device == "cuda", config_of_shape(setting.large_shape).shape
    policies = list(ColdStart) if on_gpu else [ColdStart.CACHED, ColdStart.ON_DEMAND, ColdStart.OVERLAP]
    num_adapters, rank = (3, 4) if setting.tiny else (12, 16)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        specs = save_random_adapters(
            Path(folder), shape, dtype, count=num_adapters, rank=rank, modules=MODULES
        )
        engine = build_random_engine(
            RandomEngineOptions(
                shape=setting.large_shape,
                device=setting.device,
                dtype=dtype,
                from_files=True,
                memory_bytes=GPU_MEMORY_BYTES if on_gpu else None,
                cpu_workers=NUM_WORKERS if on_gpu else None,
            )
        )
        found = {
            policy: _Answers(
                plain=_cold_answers(engine, policy, specs, setting, num_top=None),
                scored=_cold_answers(engine, policy, specs, setting, num_top=NUM_TOP),
            )
            for policy in policies
        }
        base = answers(engine, list(_requests([None] * num_adapters, setting, NUM_TOP)))
        engine.close()
    del engine
    release()
    return found, base


def _cold_answers(
    engine: Engine, policy: ColdStart, specs: list[AdapterSpec], setting: Setting, num_top: int | None
) -> dict[str, Answer]:
    engine.choose_cold_start(policy)
    # The first half is in the host's memory, the others are on disk.
    for half, staged in ((specs[::2], True), (specs[1::2], False)):
        register(engine, half, staged=staged)
    found = answers(engine, list(_requests([spec.version for spec in specs], setting, num_top)))
    for spec in specs:
        engine.remove_adapter(spec.version)
    engine.take_removed_adapters()
    return found


def _requests(
    versions: list[str] | list[None], setting: Setting, num_top: int | None
) -> Iterator[EngineRequest]:
    prompt_tokens, num_tokens = (8, 3) if setting.tiny else (100, 12)
    vocab_size = config_of_shape(setting.large_shape).shape.vocab_size
    for number, version in enumerate(versions):
        prompt = random_prompt(prompt_tokens, vocab_size, number)
        yield greedy_request(str(number), prompt, num_tokens, version, logprobs=num_top)


def _checks(dtype: str, found: dict[ColdStart, _Answers], margin: float, **details: float) -> Iterator[Check]:
    expected = found[ColdStart.CACHED].scored
    for policy, (plain, scored) in found.items():
        checks = text_and_logprob_checks(
            f"{policy}, {dtype}",
            "those of this policy with those of `cached`",
            plain=plain,
            scored=scored,
            expected=expected,
            margin=margin,
            **details,
        )
        yield from checks[:1] if scored is expected else checks  # the second would be of one with itself


def _shows(dtype: str, cached: _Answers, base: dict[str, Answer], margin: float) -> Check:
    """Were adapters to change nothing, one that is late would not be noticed."""
    least = min(logprob_error(cached.scored[name], one) for name, one in base.items())
    return holds(
        f"adapters show, {dtype}",
        "log-probabilities with the adapters and without differ by more than the tolerance",
        least > margin,
        least_difference=round(least, 3) if least < float("inf") else "no token in common",
    )
