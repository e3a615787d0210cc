"""A step in flight on a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.core.request import TokenLogprob
from loraplex.engine.cuda.cpu_assist import CpuAssist
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.executor import StepResult
from loraplex.engine.sampler import not_finite
from loraplex.scheduling.plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFlight:
    """A step in flight: its (token, finite) pairs are being copied to the host. `failures`: reasons why
    requests have no token, though it is finite; `failed_params`: the fields that are these reasons. `begun`:
    the moment from which the device could compute it, which is not before the end of the step before."""

    plan: StepPlan
    dtype: torch.dtype
    request_ids: tuple[str, ...]
    tokens_L2: torch.Tensor
    begun: Moment
    done: Moment
    runs_ahead: bool
    logprobs: dict[str, TokenLogprob]
    failures: dict[str, str]
    failed_params: dict[str, str]
    prompt_logprobs: dict[str, list[TokenLogprob]]
    assist: CpuAssist | None = None

    def land(self) -> StepResult:
        self.done.wait()
        if self.assist is not None:
            self.assist.check()
        result = StepResult(
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            failures=dict(self.failures),
            failed_params=self.failed_params,
            device_s=self.done.seconds_since(self.begun),
        )
        for request_id, (token, finite) in zip(self.request_ids, self.tokens_L2.tolist(), strict=False):
            if not finite:
                result.failures[request_id] = not_finite(self.plan, request_id, self.dtype)
            elif request_id not in result.failures:
                result.tokens[request_id] = token
        return result
