"""Section `cold`: one text, however a request starts whose adapter is not on the device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, release, within
from benchmarks.correctness.driving import (
    Answer,
    answer_lag,
    answers,
    greedy_request,
    random_prompt,
    text_error,
)
from loraplex.bench.adapter_files import save_random_adapters
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, register
from loraplex.core.cold_start import ColdStart
from loraplex.core.modules import MODULES
from loraplex.model.shapes import config_of_shape

TIE: Final = 1e-3
"""Of log-probabilities, in float32."""
NUM_WORKERS: Final = 4


def cold(setting: Setting) -> list[Check]:
    shape, on_gpu = setting.large_shape, setting.device == "cuda"
    num_adapters, rank, prompt_tokens, num_tokens = (3, 4, 8, 3) if setting.tiny else (12, 16, 100, 12)
    config = config_of_shape(shape)
    policies = list(ColdStart) if on_gpu else [ColdStart.CACHED, ColdStart.ON_DEMAND, ColdStart.OVERLAP]
    found: dict[ColdStart, dict[str, Answer]] = {}
    with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
        specs = save_random_adapters(
            Path(folder), config.shape, torch.float32, count=num_adapters, rank=rank, modules=MODULES
        )
        engine = build_random_engine(
            RandomEngineOptions(
                shape=shape,
                device=setting.device,
                dtype=torch.float32,
                from_files=True,
                cpu_workers=NUM_WORKERS if on_gpu else None,
            )
        )
        for policy in policies:
            engine.choose_cold_start(policy)
            # The first half is in the host's memory, the others are on disk.
            for half, staged in ((specs[::2], True), (specs[1::2], False)):
                register(engine, half, staged=staged)
            requests = [
                greedy_request(
                    str(number),
                    random_prompt(prompt_tokens, config.shape.vocab_size, number),
                    num_tokens,
                    spec.version,
                    logprobs=20,
                )
                for number, spec in enumerate(specs)
            ]
            found[policy] = answers(engine, requests)
            for spec in specs:
                engine.remove_adapter(spec.version)
            engine.take_removed_adapters()
        engine.close()
    del engine
    release()
    return [_compared(policy, found[policy], found[ColdStart.CACHED]) for policy in policies[1:]]


def _compared(policy: ColdStart, found: dict[str, Answer], warm: dict[str, Answer]) -> Check:
    errors = [
        text_error(found[name].token_ids, expected.token_ids, answer_lag(expected))
        for name, expected in warm.items()
    ]
    return within(
        str(policy),
        f"{len(errors)} greedy texts with those of `cached`; where one differs, by how much its token is "
        "less likely than the one chosen there (log-probabilities)",
        max(error for error, _ in errors),
        TIE,
        texts_equal=sum(error == 0.0 for error, _ in errors),
    )
