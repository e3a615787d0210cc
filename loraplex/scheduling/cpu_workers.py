"""Decides how many CPU workers an engine starts, live or simulated."""

from __future__ import annotations

from typing import Final

from loraplex.core.cold_start import ColdStart
from loraplex.perf.cost_model import CostModel
from loraplex.perf.step_cost import StepFeatures

SHORT_PROMPT: Final = StepFeatures(num_prompts=1, num_prompt_tokens=128)
_TYPICAL_RANK: Final = 64
_HARDLY_SLOWER: Final = 1.05
_MIN_SAVED: Final = 0.1
"""Least share of a cold start's time that CPU workers must save to be worth their cores."""


def choose_num_workers(cold_start: ColdStart, costs: CostModel, *, rank_bytes: int, most: int) -> int:
    """Return the number of CPU workers to start, at most `most`.

    With measured costs, it is the fewest that are hardly slower than `most`; `auto` has some only where they
    make cold starts clearly faster. `rank_bytes`: bytes of an adapter on q, k and v per unit of rank.
    """
    if most == 0 or cold_start not in (ColdStart.AUTO, ColdStart.CPU_ASSIST):
        return 0
    if not costs.measured:
        return most if cold_start is ColdStart.CPU_ASSIST else 0
    num_bytes = _TYPICAL_RANK * rank_bytes
    number, layer_s = enough_workers(costs, num_bytes, most=most)
    return number if cold_start is ColdStart.CPU_ASSIST or _assist_pays(costs, num_bytes, layer_s) else 0


def enough_workers(
    costs: CostModel, num_bytes: int, *, most: int, num_tokens: int = SHORT_PROMPT.num_prompt_tokens
) -> tuple[int, float]:
    """Return the fewest workers that compute a layer of such an adapter hardly slower than `most`, and its
    seconds with them. More would only take cores."""
    layer_s = {
        number: costs.assist_layer_s(num_bytes, num_tokens=num_tokens, num_workers=number)
        for number in range(1, most + 1)
    }
    return next(found for found in layer_s.items() if found[1] <= _HARDLY_SLOWER * layer_s[most])


def _assist_pays(costs: CostModel, num_bytes: int, layer_s: float) -> bool:
    """Return whether CPU workers that compute a layer in `layer_s` make a cold start clearly faster."""
    num_layers, step_s = costs.subject.num_layers, costs.step_s(SHORT_PROMPT)
    plan = costs.assist_layers([num_bytes // num_layers] * num_layers, step_s, layer_s)
    return costs.assist_is_sure(plan, step_s) and plan.saved_s > _MIN_SAVED * (step_s + plan.delay_s)
