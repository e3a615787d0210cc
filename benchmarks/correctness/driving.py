"""Engines driven by hand: requests in, answers out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.correctness.check import Setting
from loraplex.core.request import EngineRequest, FinishReason, TokenLogprob
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions

TIME_LIMIT_S: Final = 240.0
MEMORY_FRACTION: Final = 0.25
"""The share of the device's memory for an engine beside a model of transformers and other sections."""


@dataclass(slots=True)
class Answer:
    """All that came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None


def build(folder: Path, dtype: str, setting: Setting, **options: Any) -> Engine:
    """An engine over a checkpoint."""
    if setting.device == "cuda":
        options["memory_fraction"] = MEMORY_FRACTION + _used_share()
    else:
        options |= {"kv_memory_bytes": 1 << 24, "host_adapter_memory_bytes": 1 << 26}
    return build_core(EngineOptions(model=str(folder), device=setting.device, dtype=dtype, **options))


def _used_share() -> float:
    """Return the share of the device's memory that is used already, by other sections too."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return 1.0 - free_bytes / total_bytes


def greedy_request(
    request_id: str, prompt: Sequence[int], num_tokens: int, adapter: str | None = None, **params: Any
) -> EngineRequest:
    settings = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **params)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=list(prompt), params=settings, adapter=adapter
    )


def random_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def answers(
    engine: Engine, requests: Sequence[EngineRequest], *, prepared: bool = False
) -> dict[str, Answer]:
    """All requests at once, on an engine that is ready as a server's is, or as it was `prepared` by the
    caller; in the order in which they ended. Raises if some never do."""
    if not prepared:
        engine.get_ready()
    for request in requests:
        engine.add_request(request)
    under_way: dict[str, Answer] = {request.request_id: Answer() for request in requests}
    ended: dict[str, Answer] = {}
    started = time.monotonic()
    while engine.has_work():
        if time.monotonic() - started > TIME_LIMIT_S:
            raise TimeoutError(f"{len(under_way)} of {len(requests)} requests did not end")
        for output in engine.step():
            answer = under_way[output.request_id]
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs or ()
            answer.finish_reason, answer.error = output.finish_reason, output.error
            if output.finish_reason is not None:
                ended[output.request_id] = under_way.pop(output.request_id)
    engine.take_removed_adapters()
    engine.check_integrity()
    if under_way:
        raise RuntimeError(f"{len(under_way)} of {len(requests)} requests were never answered")
    return ended


def bring_in(engine: Engine, versions: Sequence[str]) -> None:
    """Load adapters by a short request to each, so that those that follow share batches from the start."""
    answers(engine, [greedy_request(f"bring in {version}", [1], 1, version) for version in versions])
