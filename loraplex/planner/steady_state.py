"""Judges GPUs of our own engine by the cost model alone, in microseconds, where the twin takes seconds.

A GPU that is offered more than it can serve runs as many requests as it may, and starts one whenever another
ends. How long a step then takes follows from the requests in it: each decodes a token, except those that
start, whose prompts are read; they are on adapters by these' rates, and so many different ones as that makes
likely. As many requests end per step as there are running over the tokens of an answer. What that serves is
the most that the GPU can; it starves if less than 0.9 of what is offered.

Left out are waits for adapters that are being copied, which delay requests but hardly the others' steps. The
twin, which has these, judges the finished plan; so there is a margin for what it finds less, and for requests
that its runs end in the middle of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from loraplex.core.modules import GROUPS
from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepFeatures
from loraplex.planner.demand import AdapterDemand, Demand, PlanError
from loraplex.planner.features import rates_and_ranks
from loraplex.planner.judge import Verdict
from loraplex.planner.traffic import length_moments
from loraplex.twin.outcome import STARVED_BELOW
from loraplex.twin.replay import MAX_RUNNING
from loraplex.twin.slot_state import Floats

MARGIN: Final = 0.93
"""Share of the computed throughput that is relied on: in runs of minutes, the twin serves 0.97 to 0.99 of
it, and draws some percent more requests by one seed than by another."""
_UNLIKELY: Final = 1e-4
"""Probability below which so many prompts in one step are left out."""


class SteadyStateJudge:
    """Judges what a GPU serves when it is full."""

    def __init__(self, profile: CostModel, demand: Demand) -> None:
        if profile.memory is None:
            raise PlanError(
                "the profile has no 'memory': it was not measured; make one with `loraplex profile`"
            )
        self._profile = profile
        self._memory = profile.memory
        self._rank_bytes = profile.memory.bytes_per_rank(GROUPS["qkv"])
        self._prompt, _ = length_moments(demand.prompt_tokens)
        self._output, output_square = length_moments(demand.output_tokens)
        # A token of an answer is more likely one of a long answer: these attend to more than the mean.
        self._context = self._prompt + output_square / self._output / 2
        self.request_tokens = self._prompt + self._output

    def judge(self, adapters: Sequence[AdapterDemand], num_slots: int | None) -> Verdict:
        """See `Judge`."""
        assert num_slots is None, "an engine without slots"
        if not adapters:
            return Verdict(0.0, False)
        rates, ranks = rates_and_ranks(adapters)
        offered_tok_s = float(rates.sum()) * self.request_tokens
        most_tok_s = self.most_tok_s(rates, ranks)
        is_starved = most_tok_s == 0.0 or most_tok_s < STARVED_BELOW * offered_tok_s
        return Verdict(min(offered_tok_s, most_tok_s), is_starved)

    def fits(self, max_rank: int, num_slots: int) -> bool:
        """See `Judge`. Adapters share the memory as they are used."""
        return True

    def most_tok_s(self, rates_rps: Floats, ranks: Floats) -> float:
        """Return the tokens per second, of prompts and answers, that a GPU serves at most."""
        total_rps = float(rates_rps.sum())
        shares = rates_rps / total_rps if total_rps > 0 else np.full(len(rates_rps), 1 / len(rates_rps))
        sizes = self._memory.table_bytes + ranks * self._rank_bytes
        if self._room_for(float(sizes.max())) < 1.0:
            return 0.0
        num_running = float(MAX_RUNNING)
        for _ in range(2):  # the fewer requests run, the fewer adapters take memory from them
            in_use_bytes = float(-np.expm1(-num_running * shares) @ sizes)
            num_running = min(float(MAX_RUNNING), max(self._room_for(in_use_bytes), 1.0))
        in_use = -np.expm1(-num_running * shares)
        step_s = self._step_s(num_running, in_use, shares, sizes)
        return MARGIN * num_running / (self._output * step_s) * self.request_tokens

    def _room_for(self, adapter_bytes: float) -> float:
        """Return how many requests have memory for their tokens beside adapters of so many bytes."""
        has = self._memory
        tokens = self._context + has.block_tokens
        if has.arena_bytes is None:
            assert has.kv_tokens is not None
            return has.kv_tokens / tokens
        return max(has.arena_bytes - adapter_bytes, 0.0) / (has.token_bytes * tokens)

    def _step_s(self, num_running: float, in_use: Floats, shares: Floats, sizes: Floats) -> float:
        """Return the mean seconds of a step, over the numbers of prompts that may be in it."""
        mean_prompts = num_running / self._output
        # Requests of large adapters are as likely to be in a step as others; their bytes count for each row.
        row_bytes = float(shares @ sizes)
        probability, mean_s, number = math.exp(-mean_prompts), 0.0, 0
        left = 1.0
        while left > _UNLIKELY:
            mean_s += probability * self._seconds(num_running, number, in_use, row_bytes, sizes)
            left -= probability
            number += 1
            probability *= mean_prompts / number
        return mean_s / (1 - left)

    def _seconds(
        self, num_running: float, num_prompts: int, in_use: Floats, row_bytes: float, sizes: Floats
    ) -> float:
        num_decodes = max(num_running - num_prompts, 0.0)
        num_tokens = num_prompts * self._prompt
        num_rows = num_decodes + num_tokens
        return self._profile.step_s(
            StepFeatures(
                num_decodes=round(num_decodes),
                num_prompts=num_prompts,
                num_prompt_tokens=round(num_tokens),
                decode_positions=num_decodes * self._context,
                prompt_pairs=num_tokens * self._prompt / 2,
                num_adapters=round(float(in_use.sum())),
                adapter_bytes=float(in_use @ sizes),
                row_adapter_bytes=num_rows * row_bytes,
                largest_adapter_bytes=float(sizes.max()),
                num_adapter_rows=round(num_rows),
            )
        )
