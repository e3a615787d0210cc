"""The part of the /metrics page that grows with the adapters.

Written by hand: a sample object of the Prometheus library costs many times what its line does, and there
are six lines for each of what may be ten thousand adapters. Names of adapters need no escaping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.server.adapter_service import ServedAdapter
from loraplex.server.metrics import ServerMetrics, Traffic

_UNKNOWN = AdapterStats(version="", tier="disk", num_bytes=0, in_flight=0, hits=0, loads=0)
"""What the engine says of no adapter: for a moment after its restart it knows none."""


def render_adapters(adapters: Sequence[ServedAdapter], metrics: ServerMetrics, stats: EngineStats) -> bytes:
    """The series of each adapter. A TTFT histogram is there only for those somebody has asked for."""
    by_version = {each.version: each for each in stats.adapters}
    idle = Traffic()
    rows = [
        (
            adapter.name,
            metrics.find_traffic(adapter.name) or idle,
            by_version.get(adapter.version, _UNKNOWN),
        )
        for adapter in adapters
    ]

    def family(name: str, kind: str, text: str, value: Callable[[Traffic, AdapterStats], int]) -> str:
        lines = [f'{name}{{adapter="{adapter}"}} {value(traffic, seen)}\n' for adapter, traffic, seen in rows]
        return _family(name, kind, text, lines)

    return "".join(
        [
            _family(
                "loraplex:adapter_ttft_seconds",
                "histogram",
                "Arrival to first token; only of adapters in use",
                [_ttft_lines(name, traffic) for name, traffic, _ in rows if any(traffic.ttft.counts)],
            ),
            family(
                "loraplex:adapter_requests_total", "counter", "Requests accepted", lambda t, _: t.num_requests
            ),
            family(
                "loraplex:adapter_generation_tokens_total",
                "counter",
                "Tokens generated",
                lambda t, _: t.num_tokens,
            ),
            family(
                "loraplex:adapter_loads_total",
                "counter",
                "Loads of the weights into memory",
                lambda _, s: s.loads,
            ),
            family(
                "loraplex:adapter_hits_total",
                "counter",
                "Requests that found them there",
                lambda _, s: s.hits,
            ),
            family("loraplex:adapter_in_flight", "gauge", "Requests in the engine", lambda _, s: s.in_flight),
            _family(
                "loraplex:adapter_resident",
                "gauge",
                "1, with the tier the weights are in",
                [
                    f'loraplex:adapter_resident{{adapter="{name}",tier="{seen.tier}"}} 1\n'
                    for name, _, seen in rows
                ],
            ),
        ]
    ).encode()


def _family(name: str, kind: str, text: str, lines: Iterable[str]) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}"


def _ttft_lines(adapter: str, traffic: Traffic) -> str:
    name, histogram = "loraplex:adapter_ttft_seconds", traffic.ttft
    buckets = histogram.cumulative()
    lines = [f'{name}_bucket{{adapter="{adapter}",le="{bound}"}} {count}\n' for bound, count in buckets]
    lines.append(f'{name}_count{{adapter="{adapter}"}} {buckets[-1][1]}\n')
    lines.append(f'{name}_sum{{adapter="{adapter}"}} {histogram.total}\n')
    return "".join(lines)
