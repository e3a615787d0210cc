"""Compares a simulated run with a live one, from the file that a benchmark wrote."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from loraplex.core.batching import Batching, DelayBound, bound_of
from loraplex.core.errors import UserError
from loraplex.core.modules import module_names
from loraplex.core.words import plural
from loraplex.perf.named_profiles import Profile
from loraplex.perf.slot_profile import SlotProfile
from loraplex.scheduling.work import StepWork
from loraplex.twin.outcome import Outcome
from loraplex.twin.scores import smape


class LiveEngine(NamedTuple):
    """The engine that a file of `bench engine serve` describes, with adapters in host memory at the start.
    `num_adapters`: 0 if there were none; a workload's adapter numbers are taken modulo it."""

    device: str
    num_adapters: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    kv_tokens: int
    work: StepWork
    batching: Batching
    max_delay: DelayBound


def engine_of(live: Any) -> LiveEngine | None:
    """Return the engine; None if the file is of another kind, without a description of the engine."""
    parameters = live.get("parameters") if isinstance(live, dict) else None
    if not isinstance(parameters, dict) or "kv_tokens" not in parameters:
        return None
    try:
        batching = Batching(parameters.get("batching", Batching.FCFS))
        ranks = str(parameters["ranks"] if "ranks" in parameters else parameters["rank"])
        return LiveEngine(
            device=str(parameters["device"]),
            num_adapters=int(parameters["num_adapters"]),
            ranks=tuple(int(each) for each in ranks.split(",")),
            modules=module_names(str(parameters["modules"])),
            kv_tokens=int(parameters["kv_tokens"]),
            work=StepWork(
                max_tokens=int(parameters["max_step_tokens"]),
                position_cost=float(parameters["position_cost"]),
            ),
            batching=batching,
            max_delay=bound_of(parameters.get("max_delay_by_grouping"), batching),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the live result's parameters cannot be read ({error}); give a file of `loraplex bench`"
        ) from error


def check_profile(profile: Profile, engine: LiveEngine) -> None:
    """Raise UserError if the profile is not of such an engine."""
    if isinstance(profile, SlotProfile):
        raise UserError("it is a run of our own engine, and the profile is of one with slots for adapters")
    if profile.subject.device != engine.device:
        raise UserError(
            f"it is a run on {engine.device}, and the profile is of {profile.subject.device}; give one that "
            "was measured there"
        )


def compare(outcome: Outcome, live: Any) -> dict[str, dict[str, float]]:
    """Return the figures of a twin's run and of a live run's report, and their SMAPE."""
    if not isinstance(live, dict):
        raise UserError("the live result is no JSON object; give a file of `loraplex bench serve --json`")
    summary, result = outcome.summary(), live.get("result", live.get("results", live))
    asked = summary["num_requests"]
    if isinstance(result, dict) and result.get("num_requests", asked) != asked:
        raise UserError(
            f"the live result is of {result['num_requests']} {plural('request', result['num_requests'])}, "
            f"the workload has {asked}; give a run of the same workload"
        )
    num_tokens = sum(each.request.prompt_tokens for each in outcome.requests)
    if isinstance(result, dict) and not result.get("num_failed"):
        found = result.get("prompt_tokens", num_tokens)
        if found != num_tokens:
            raise UserError(
                f"the live result is of {found} prompt tokens, the workload has {num_tokens}; give a run of "
                "the same workload"
            )
    pairs: dict[str, tuple[float, float]] = {}
    for name, predicted, measured in (
        ("output_tok_s", _output_tok_s(outcome), _take(result, "output_tokens_per_s")),
        ("itl_s", summary["itl_mean_s"], _take(result, "itl_ms", "mean") / 1e3),
        ("ttft_s", (summary["ttft_s"] or {}).get("mean"), _take(result, "ttft_ms", "mean") / 1e3),
    ):
        if predicted is not None:
            pairs[name] = (predicted, measured)
    return {name: {"twin": p, "live": m, "smape": smape([(p, m)])} for name, (p, m) in pairs.items()}


def _output_tok_s(outcome: Outcome) -> float:
    """Return output tokens/s from the first arrival to the last end, as in a live run's report."""
    served = [each for each in outcome.requests if each.is_served]
    arrivals_s = [each.request.arrival_s for each in outcome.requests]
    span_s = max((each.finish_s or 0.0 for each in served), default=0.0) - min(arrivals_s, default=0.0)
    return sum(each.request.output_tokens for each in served) / span_s if span_s > 0 else 0.0


def _take(result: Any, *names: str) -> float:
    for name in names:
        if not isinstance(result, dict) or name not in result:
            raise UserError(
                f"the live result has no {'.'.join(names)}; give a file of `loraplex bench serve` or `bench "
                "engine serve`"
            )
        result = result[name]
    if isinstance(result, bool) or not isinstance(result, int | float) or not 0 <= result < math.inf:
        raise UserError(
            f"the live result's {'.'.join(names)} is {result!r}, not a number that can be measured"
        )
    return float(result)
