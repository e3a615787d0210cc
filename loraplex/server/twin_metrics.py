"""The part of the /metrics page about the shadow twin: predicted and measured figures of the last minutes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from loraplex.server.shadow_messages import Replayed
from loraplex.server.shadow_twin import TwinFigures


def twin_families(twin: TwinFigures) -> Iterator[Metric]:
    """Yield the metric families of the twin; those of figures are missing if there is no recent replay."""
    info = GaugeMetricFamily(
        "loraplex:twin_profile_info",
        "1, with the profile that the twin goes by: measured, on this machine or one of its kind, or a guess",
        labels=["profile"],
    )
    info.add_metric(["measured" if twin.is_measured else "guess"], 1)
    yield info
    replays = CounterMetricFamily(
        "loraplex:twin_replays",
        "Replays of the last minutes on the twin, by how they ended",
        labels=["result"],
    )
    for end, count in twin.num_replays.items():
        replays.add_metric([end.value], count)
    yield replays
    if twin.latest is not None:
        yield from _figures(twin.latest)


def _figures(replayed: Replayed) -> Iterator[Metric]:
    measured, predicted = replayed.measured, replayed.predicted
    assert predicted is not None, "a replay that is shown has figures"
    errors = GaugeMetricFamily(
        "loraplex:twin_relative_error",
        "Predicted over measured, less one: 0.1 is 10% too high",
        labels=["figure"],
    )
    for name, text, was, would_be in (
        ("throughput", "Tokens generated per second", measured.tokens_per_s, predicted.tokens_per_s),
        ("ttft", "Mean seconds from the engine's being sent a request to its first token",
         measured.ttft_s, predicted.ttft_s),
        ("itl", "Mean seconds between two tokens of a request", measured.itl_s, predicted.itl_s),
    ):  # fmt: skip
        unit = "tokens_per_second" if name == "throughput" else "seconds"
        family = GaugeMetricFamily(
            f"loraplex:twin_{name}_{unit}", f"{text}, of the last minutes", labels=["source"]
        )
        for source, value in (("measured", was), ("predicted", would_be)):
            if value is not None:
                family.add_metric([source], value)
        yield family
        if was and would_be is not None:
            errors.add_metric([name], would_be / was - 1)
    yield errors
    requests = GaugeMetricFamily("loraplex:twin_requests", "Requests of the minutes that were replayed")
    requests.add_metric([], replayed.num_requests)
    yield requests
    seconds = GaugeMetricFamily("loraplex:twin_replay_seconds", "CPU time that their replay took")
    seconds.add_metric([], replayed.seconds)
    yield seconds
