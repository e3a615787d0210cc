"""The /metrics page: vLLM's names where vLLM has one, so that dashboards made for it work here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from loraplex.core.request import FinishReason
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.server.adapter_service import ServedAdapter
from loraplex.server.metrics import Histogram, ServerMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TIERS: Final = ("disk", "loading", "host", "device")


def render_metrics(
    *, base_model: str, metrics: ServerMetrics, stats: EngineStats, adapters: Iterable[ServedAdapter]
) -> bytes:
    """The page as of now. Adapters without a single request are on it, unloaded ones are not."""
    # A registry for each page: its content is a snapshot, so there is nothing to keep between two.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(base_model, metrics, stats, list(adapters)))
    return generate_latest(registry)


class _Page:
    def __init__(
        self, base_model: str, metrics: ServerMetrics, stats: EngineStats, adapters: list[ServedAdapter]
    ) -> None:
        self._labels = {"model_name": base_model}
        self._metrics = metrics
        self._stats = stats
        self._adapters = adapters

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._requests()
        yield self._lora_info()
        yield from self._adapter_series()

    def _engine(self) -> Iterator[Metric]:
        stats = self._stats
        usage = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache; 1 is full", usage)
        yield self._counter("vllm:num_preemptions", "Requests set back by preemption", stats.num_preemptions)
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
        yield self._counter("loraplex:engine_steps", "Steps the engine has run", stats.num_steps)
        num_bytes, budget = stats.host_adapter_bytes, stats.host_adapter_budget_bytes
        yield self._gauge("loraplex:host_adapter_bytes", "Host memory held by adapter weights", num_bytes)
        yield self._gauge("loraplex:host_adapter_budget_bytes", "Most of it that may be held", budget)

    def _requests(self) -> Iterator[Metric]:
        counts = self._metrics
        prompt, generated = counts.num_prompt_tokens, counts.num_generation_tokens
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed", prompt)
        yield self._counter("vllm:generation_tokens", "Tokens generated", generated)
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences finished, by reason", labels=[*self._labels, "finished_reason"]
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            finished.add_metric([*self._labels.values(), reason.value], counts.num_finished[reason.value])
        yield finished
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "Arrival to first token", counts.ttft),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a sequence", counts.inter_token),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean time per token after the first, by request",
                counts.per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token", counts.e2e),
        ):
            family = HistogramMetricFamily(name, text, labels=list(self._labels))
            _add_histogram(family, list(self._labels.values()), histogram)
            yield family

    def _lora_info(self) -> Metric:
        """vLLM's gauge of adapters in use, read by load balancers. There is no limit here: all fit."""
        running, waiting = [], []
        for adapter in self._adapters:
            traffic = self._metrics.traffic(adapter.name)
            if traffic.num_running:
                running.append(adapter.name)
            if traffic.num_waiting:
                waiting.append(adapter.name)
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with requests; the value is the time of this snapshot",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        family.add_metric([str(len(self._adapters)), ",".join(running), ",".join(waiting)], time.time())
        return family

    def _adapter_series(self) -> Iterator[Metric]:
        by_version: Mapping[str, AdapterStats] = {stats.version: stats for stats in self._stats.adapters}
        label = ["adapter"]
        ttft = HistogramMetricFamily("loraplex:adapter_ttft_seconds", "Arrival to first token", labels=label)
        requests = CounterMetricFamily("loraplex:adapter_requests", "Requests accepted", labels=label)
        tokens = CounterMetricFamily("loraplex:adapter_generation_tokens", "Tokens generated", labels=label)
        loads = CounterMetricFamily(
            "loraplex:adapter_loads", "Loads of the weights into memory", labels=label
        )
        hits = CounterMetricFamily("loraplex:adapter_hits", "Requests that found them there", labels=label)
        in_flight = GaugeMetricFamily("loraplex:adapter_in_flight", "Requests in the engine", labels=label)
        resident = GaugeMetricFamily(
            "loraplex:adapter_resident", "1 for the tier the weights are in", labels=["adapter", "tier"]
        )
        for adapter in self._adapters:
            name, traffic = adapter.name, self._metrics.traffic(adapter.name)
            stats = by_version.get(adapter.version)
            _add_histogram(ttft, [name], traffic.ttft)
            requests.add_metric([name], traffic.num_requests)
            tokens.add_metric([name], traffic.num_tokens)
            loads.add_metric([name], stats.loads if stats else 0)
            hits.add_metric([name], stats.hits if stats else 0)
            in_flight.add_metric([name], stats.in_flight if stats else 0)
            for tier in _TIERS:
                resident.add_metric([name, tier], float(tier == (stats.tier if stats else "disk")))
        yield from (ttft, requests, tokens, loads, hits, in_flight, resident)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def _add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.total)
