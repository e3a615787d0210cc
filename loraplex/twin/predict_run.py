"""Predicts a recorded run's figures from its setup and a profile of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loraplex.perf.slot_profile import SlotProfile
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.recorded_runs import RunSetup
from loraplex.twin.run_workload import AdapterMix, WorkloadBook
from loraplex.twin.scores import ttft_of_all
from loraplex.twin.slot_engine import SlotRun, run_slot_engine
from loraplex.twin.slot_state import BLOCK_SIZE, Limits, Requests


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Predicted figures: tokens per second, and seconds. `ttft_s`: of completed requests. `ttft_all_s`: of
    all requests sent, see `scores.ttft_of_all`."""

    input_tok_s: float
    output_tok_s: float
    itl_s: float
    ttft_s: float
    ttft_all_s: float
    is_starved: bool
    mean_running: float
    mean_waiting: float
    num_loads: int
    num_preemptions: int

    @property
    def total_tok_s(self) -> float:
        return self.input_tok_s + self.output_tok_s


def predict_run(
    profile: SlotProfile,
    book: WorkloadBook,
    setup: RunSetup,
    drawn: tuple[Requests, AdapterMix] | None = None,
) -> Predicted | None:
    """Return the predicted figures; None if the slots leave no memory to run in. `drawn`: the requests, if
    they were drawn already."""
    requests, mix = drawn or book.requests(setup)
    limits = run_limits(
        profile,
        num_slots=setup.num_slots,
        max_rank=setup.max_rank,
        longest=int((requests.prompt_tokens + requests.output_tokens).max()),
        duration_s=setup.duration_s,
        max_running=setup.max_running,
    )
    if limits is None:
        return None
    return predict_requests(profile, limits, requests, mix, offered_tok_s=book.offered_tok_s(setup))


def run_limits(
    profile: SlotProfile,
    *,
    num_slots: int,
    max_rank: int,
    longest: int,
    duration_s: float,
    max_running: int | None = None,
) -> Limits | None:
    """Return the limits of an engine with these slots; None if they leave no memory for a request of
    `longest` tokens. `max_running`: None for the profile's."""
    num_blocks = profile.memory.predict(num_slots=num_slots, max_rank=max_rank) // BLOCK_SIZE
    spare_blocks = profile.spare_blocks(num_blocks)
    if num_blocks < -(-longest // BLOCK_SIZE) + spare_blocks:
        return None
    return Limits(
        num_slots=num_slots,
        max_rank=max_rank,
        num_blocks=num_blocks,
        spare_blocks=spare_blocks,
        max_running=min(max_running or profile.max_running, profile.max_running),
        max_step_tokens=profile.max_step_tokens,
        max_open=profile.client.max_open,
        until_s=duration_s,
    )


def predict_requests(
    profile: SlotProfile, limits: Limits, requests: Requests, mix: AdapterMix, *, offered_tok_s: float
) -> Predicted:
    """Return the predicted figures of these requests, up to `limits.until_s`."""
    run = run_slot_engine(requests, limits, profile.costs, ranks=mix.ranks, order=mix.order)
    return _figures(run, limits.until_s, profile.client.latency_s, offered_tok_s)


def _figures(run: SlotRun, duration_s: float, latency_s: float, offered_tok_s: float) -> Predicted:
    done = ~np.isnan(run.finish_s)
    arrival_s, first_s, finish_s = run.requests.arrival_s[done], run.first_s[done], run.finish_s[done]
    outputs = run.requests.output_tokens[done]
    num_gaps = int((outputs - 1).sum())
    num_input, num_output = int(run.requests.prompt_tokens[done].sum()), int(outputs.sum())
    served_tok_s = (num_input + num_output) / duration_s
    ttft_s = float((first_s - arrival_s).mean()) + latency_s if len(first_s) else duration_s
    return Predicted(
        input_tok_s=num_input / duration_s,
        output_tok_s=num_output / duration_s,
        itl_s=float((finish_s - first_s).sum()) / num_gaps if num_gaps else 0.0,
        ttft_s=ttft_s,
        ttft_all_s=ttft_of_all(ttft_s, num_completed=len(first_s), num_sent=len(done), duration_s=duration_s),
        is_starved=served_tok_s < STARVED_BELOW * offered_tok_s,
        mean_running=run.mean_running,
        mean_waiting=run.mean_waiting,
        num_loads=run.num_loads,
        num_preemptions=run.num_preemptions,
    )
