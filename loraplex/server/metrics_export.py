"""The /metrics page. It uses vLLM's names where vLLM has one, so that its dashboards work here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from loraplex.core.batching import Batching
from loraplex.core.request import FinishReason
from loraplex.core.stats import EngineStats
from loraplex.server.adapter_metrics import MAX_NAMED, render_adapters
from loraplex.server.engine_status import EngineState, ReplicaStatus
from loraplex.server.metrics import Histogram, ServerMetrics
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.shadow_twin import TwinFigures
from loraplex.server.twin_metrics import twin_families

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_VLLM_REASONS: Final = {  # ours -> vLLM's word for it
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True, kw_only=True)
class MetricsSnapshot:
    """Everything that a page shows. It is immutable, as pages are rendered in another thread, except for
    `holders`, which that thread calls for the adapters shown: the replicas of a fleet that have a version in
    memory; None for a single engine. `batching`: the engine's policy; None if it is not known."""

    base_model: str
    metrics: ServerMetrics
    stats: EngineStats
    num_restarts: int
    num_refused: Mapping[str, int]
    num_continued: Mapping[str, int]
    adapters: Sequence[ServedAdapter]
    num_left_out: int = 0
    replicas: Sequence[ReplicaStatus] = ()
    holders: Callable[[str], Sequence[int]] | None = None
    num_plans: int = 0
    batching: Batching | None = None
    twin: TwinFigures | None = None


def render_metrics(snapshot: MetricsSnapshot) -> bytes:
    """Return the page. It shows served adapters that were requested or are in memory."""
    # A new registry for each page: it shows a snapshot, so nothing is kept between pages.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(snapshot))
    adapters = render_adapters(snapshot.adapters, snapshot.metrics, snapshot.stats, snapshot.holders)
    return generate_latest(registry) + adapters


class _Page:
    def __init__(self, snapshot: MetricsSnapshot) -> None:
        self._labels = {"model_name": snapshot.base_model}
        self._metrics = snapshot.metrics
        self._stats = snapshot.stats
        self._num_restarts = snapshot.num_restarts
        self._num_refused = snapshot.num_refused
        self._num_continued = snapshot.num_continued
        self._adapters = snapshot.adapters
        self._num_left_out = snapshot.num_left_out
        self._replicas = snapshot.replicas
        self._num_plans = snapshot.num_plans
        self._batching_policy = snapshot.batching
        self._twin = snapshot.twin

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._requests()
        yield self._lora_info()
        if self._replicas:
            yield from self._each_replica()
        if self._twin is not None:
            yield from twin_families(self._twin)

    def _batching(self) -> Iterator[Metric]:
        """Yield what the batching policy decided."""
        stats = self._stats
        if self._batching_policy is not None:
            policy = GaugeMetricFamily(
                "loraplex:batching_info", "1, with the batching policy", labels=[*self._labels, "policy"]
            )
            policy.add_metric([*self._labels.values(), self._batching_policy], 1)
            yield policy
        for name, text, value in (
            ("merged_steps", "Steps on weights into which an adapter is merged", stats.num_merged_steps),
            ("merges", "Adapters merged into the second set of weights", stats.num_merges),
            ("batching_switches", "Changes between merged and unmerged steps", stats.num_switches),
            ("pauses", "Running requests left out of a step, summed over steps", stats.num_pauses),
            ("step_adapters", "Adapters read by a step, summed over steps", stats.num_step_adapters),
        ):
            yield self._counter(f"loraplex:{name}", text, value)
        yield self._gauge(
            "loraplex:merged", "Engines that hold merged weights of an adapter", stats.is_merged
        )
        yield self._gauge(
            "loraplex:owed_credit_seconds",
            "Waiting that adapters are owed by others (`--batching dynamic`)",
            stats.owed_credit_s,
        )

    def _engine(self) -> Iterator[Metric]:
        stats = self._stats
        usage = stats.num_kv_blocks_used / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache; 1 is full", usage)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "1, with the size of the KV cache", labels=["num_gpu_blocks"]
        )
        cache.add_metric([str(stats.num_kv_blocks)], 1)
        yield cache
        yield self._counter("vllm:num_preemptions", "Requests set back by preemption", stats.num_preemptions)
        queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", hits)
        yield self._counter("loraplex:engine_steps", "Steps the engine has run", stats.num_steps)
        yield self._counter(
            "loraplex:engine_restarts",
            "Restarts of the engine process, after it died or by `fleet restart`",
            self._num_restarts,
        )
        yield self._by_reason(
            "loraplex:requests_refused",
            "Calls refused with 429: the queue was full, or the first token predicted too late",
            self._num_refused,
        )
        yield self._by_reason(
            "loraplex:continuations",
            "Requests that went on at another engine: the one they were at died, or gave them up",
            self._num_continued,
        )
        yield from self._batching()
        yield self._gauge("loraplex:adapters", "Adapters that are served", len(self._adapters))
        yield self._gauge(
            "loraplex:adapters_left_out",
            "Adapters that are not served since the start, and are tried again",
            self._num_left_out,
        )
        num_bytes, budget = stats.host_adapter_bytes, stats.host_adapter_budget_bytes
        yield self._gauge(
            "loraplex:host_adapter_bytes", "Host memory held by adapter weights, merged ones too", num_bytes
        )
        yield self._gauge("loraplex:host_adapter_budget_bytes", "Most of it that may be held", budget)
        num_bytes, arena = stats.device_adapter_bytes, stats.device_arena_bytes
        for name, text, value in (
            ("file_reads", "Adapters read from their files", stats.adapter_file_reads),
            ("fetches", "Adapters copied from another replica's host memory", stats.adapter_fetches),
            ("fetched_bytes", "Bytes of them", stats.adapter_bytes_fetched),
            ("fetch_failures", "Copies from a replica that came to nothing", stats.adapter_fetch_failures),
        ):
            yield self._counter(f"loraplex:adapter_{name}", text, value)
        yield self._gauge(
            "loraplex:device_adapter_bytes", "GPU memory held by adapter weights, merged ones too", num_bytes
        )
        yield self._gauge("loraplex:device_arena_bytes", "GPU memory that adapters and KV share", arena)
        yield from self._host_kv()
        for name, predicted_s, measured_s in (
            ("step", stats.predicted_step_s, stats.measured_step_s),
            ("copy", stats.predicted_copy_s, stats.measured_copy_s),
        ):
            if measured_s > 0:
                yield self._gauge(
                    f"loraplex:{name}_time_predicted_over_measured",
                    f"What the cost model predicts of a {name} over what it takes, lately",
                    predicted_s / measured_s,
                )

    def _host_kv(self) -> Iterator[Metric]:
        """Yield the figures of the host tier of KV blocks (`--kv-swap-memory`)."""
        stats = self._stats
        for name, text, value in (
            ("bytes", "Pinned host memory held by keys and values", stats.host_kv_bytes),
            ("budget_bytes", "Most of it that may be held", stats.host_kv_budget_bytes),
        ):
            yield self._gauge(f"loraplex:host_kv_{name}", text, value)
        for name, text, value in (
            ("kv_blocks_swapped_out", "KV blocks copied to the host", stats.kv_blocks_swapped_out),
            ("kv_blocks_swapped_in", "KV blocks copied back to the GPU", stats.kv_blocks_swapped_in),
            (
                "host_kv_hits",
                "Prompt tokens found in the prefix cache because the host held them",
                stats.host_kv_hits,
            ),
        ):
            yield self._counter(f"loraplex:{name}", text, value)

    def _requests(self) -> Iterator[Metric]:
        counts = self._metrics
        prompt, generated = counts.num_prompt_tokens, counts.num_generation_tokens
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed", prompt)
        yield self._counter("vllm:generation_tokens", "Tokens generated", generated)
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences finished, by reason", labels=[*self._labels, "finished_reason"]
        )
        for reason, word in _VLLM_REASONS.items():
            finished.add_metric([*self._labels.values(), word], counts.num_finished[reason])
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
            yield self._histogram(name, text, histogram)

    def _lora_info(self) -> Metric:
        """Return vLLM's gauge of adapters in use, read by load balancers. `max_lora` is the number of
        adapters, because there is no limit here. At most `MAX_NAMED` are named in each list."""
        running, waiting = [], []
        for adapter in self._adapters:
            traffic = self._metrics.find_traffic(adapter.name)
            if traffic is not None and traffic.num_running:
                running.append(adapter.name)
            if traffic is not None and traffic.num_waiting:
                waiting.append(adapter.name)
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters with requests; the value is the time of this snapshot",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        family.add_metric(
            [str(len(self._adapters)), *(",".join(names[:MAX_NAMED]) for names in (running, waiting))],
            time.time(),
        )
        return family

    def _each_replica(self) -> Iterator[Metric]:
        families: tuple[tuple[Any, str, str, Callable[[ReplicaStatus], float]], ...] = (
            (GaugeMetricFamily, "up", "1 if the replica is ready", _is_ready),
            (GaugeMetricFamily, "drained", "1 if it is sent no requests, by order", lambda r: r.drained),
            (
                GaugeMetricFamily,
                "in_flight",
                "Requests it was sent and has not ended",
                lambda r: r.num_in_flight,
            ),
            (CounterMetricFamily, "requests", "Requests it was sent", lambda r: r.num_sent),
            (
                CounterMetricFamily,
                "replays",
                "Requests it took over from another replica, whose tokens it read again",
                lambda r: r.num_replayed,
            ),
            (
                CounterMetricFamily,
                "adapter_hits",
                "Requests that found their adapter in its memory or on its way there",
                lambda r: r.num_hits,
            ),
            (
                CounterMetricFamily,
                "adapter_loads",
                "Loads of adapters into its memory",
                lambda r: r.num_loads,
            ),
            (
                CounterMetricFamily,
                "adapter_fetches",
                "Adapters that it copied from another replica's host memory",
                lambda r: r.num_fetches,
            ),
            (
                CounterMetricFamily,
                "restarts",
                "Restarts, after it died or by `fleet restart`; of servers elsewhere, returns",
                lambda r: r.status.num_restarts,
            ),
            (
                GaugeMetricFamily,
                "placed_adapters",
                "Adapters that the placement gives it, but for those that it refuses",
                lambda r: r.num_placed,
            ),
            (GaugeMetricFamily, "refused_adapters", "Adapters that it refuses", lambda r: r.num_refused),
            (
                CounterMetricFamily,
                "adapters_brought",
                "Adapters that it brought in because the placement moved them to it",
                lambda r: r.num_brought,
            ),
            (
                CounterMetricFamily,
                "requests_migrated",
                "Requests that migrated to it",
                lambda r: r.num_migrated,
            ),
        )
        yield self._counter(
            "loraplex:placements", "Plans that gave adapters other places than before", self._num_plans
        )
        for kind, name, text, value in families:
            family = kind(f"loraplex:replica_{name}", text, labels=["replica"])
            for replica in self._replicas:
                family.add_metric([str(replica.number)], value(replica))
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by_reason(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, "reason"])
        for reason, count in counts.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        labels = list(self._labels.values())
        family.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.total)
        return family


def _is_ready(replica: ReplicaStatus) -> float:
    return float(replica.status.state is EngineState.READY)
