"""The picture of a plan."""

from __future__ import annotations

from matplotlib.collections import LineCollection, PolyCollection

from loraplex.cli.plan_plot import draw_plan
from loraplex.planner.check import GpuCheck, PlanCheck
from loraplex.planner.demand import AdapterDemand
from loraplex.planner.plan import GpuPlan, Plan


def plan_of(num_gpus: int, adapters_each: int) -> Plan:
    gpus = tuple(
        GpuPlan(
            adapters=tuple(
                AdapterDemand(name=f"{gpu}-{number}", rank=(8, 64)[number % 2], rate_rps=0.5)
                for number in range(adapters_each)
            ),
            num_slots=8,
        )
        for gpu in range(num_gpus)
    )
    return Plan(gpus=gpus, profile="p", packer="max-pack", prompt_tokens=60, output_tokens=40)


def test_every_adapter_is_a_block_and_every_gpu_has_its_limit() -> None:
    plan = plan_of(3, 4)
    checked = PlanCheck(
        gpus=tuple(GpuCheck(gpu=each, runs=(), most_tok_s=500.0) for each in plan.gpus),
        seeds=(1,),
        duration_s=None,
    )
    figure = draw_plan(plan, checked)
    (axes,) = figure.axes
    blocks = [each for each in axes.collections if isinstance(each, PolyCollection)]
    assert [len(each.get_paths()) for each in blocks] == [6, 6]
    assert sum(isinstance(each, LineCollection) for each in axes.collections) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        *("rank 8", "rank 64", "most it serves"),
    ]
    assert axes.get_ylim()[1] > 500
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "1", "2"]


def test_gpus_without_adapters_or_requests_are_drawn() -> None:
    empty = Plan(
        gpus=(GpuPlan(adapters=(), num_slots=None),),
        profile="p",
        packer="max-pack",
        prompt_tokens=60,
        output_tokens=40,
    )
    assert "0 adapters on 1 GPU" in draw_plan(empty).axes[0].get_title()


def test_many_gpus_are_not_all_numbered() -> None:
    assert len(draw_plan(plan_of(64, 2)).axes[0].get_xticks()) < 15
