"""The part of the /metrics page that grows with the adapters in use.

An adapter that nobody has asked for and whose weights are on disk has no series: thousands of adapters may be
registered. What a name is asked for is labelled by the name. What happens to weights is labelled by their
version, which several names may share; `adapter_resident` has both.

Written by hand: a sample object of the Prometheus library costs many times what its line does. Names and
versions of adapters need no escaping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from loraplex.core.stats import EngineStats
from loraplex.server.metrics import ServerMetrics, Traffic
from loraplex.server.served_adapter import ServedAdapter


def render_adapters(adapters: Sequence[ServedAdapter], metrics: ServerMetrics, stats: EngineStats) -> bytes:
    """The series of served adapters that were asked for or are in memory."""
    used = [
        (adapter.name, traffic)
        for adapter in adapters
        if (traffic := metrics.find_traffic(adapter.name)) is not None
    ]

    def by_name(name: str, kind: str, text: str, value: Callable[[Traffic], int]) -> str:
        return _family(
            name,
            kind,
            text,
            [f'{name}{{adapter="{adapter}"}} {value(traffic)}\n' for adapter, traffic in used],
        )

    return "".join(
        [
            _family(
                "loraplex:adapter_ttft_seconds",
                "histogram",
                "Arrival to first token",
                [_ttft_lines(name, traffic) for name, traffic in used if any(traffic.ttft.counts)],
            ),
            by_name(
                "loraplex:adapter_requests_total", "counter", "Requests accepted", lambda t: t.num_requests
            ),
            _family(
                "loraplex:adapter_canary_requests_total",
                "counter",
                "Those of the requests accepted that a canary answers",
                [
                    f'loraplex:adapter_canary_requests_total{{adapter="{name}"}} '
                    f"{traffic.num_canary_requests}\n"
                    for name, traffic in used
                    if traffic.num_canary_requests
                ],
            ),
            _family(
                "loraplex:adapter_canary_share",
                "gauge",
                "The share of the requests that the canary answers; not there for names without one",
                [
                    f'loraplex:adapter_canary_share{{adapter="{each.name}"}} {each.canary.share}\n'
                    for each in adapters
                    if each.canary is not None
                ],
            ),
            by_name(
                "loraplex:adapter_generation_tokens_total",
                "counter",
                "Tokens generated",
                lambda t: t.num_tokens,
            ),
            by_name(
                "loraplex:adapter_hits_total",
                "counter",
                "Requests that found the weights in memory or on their way there",
                lambda t: t.num_hits,
            ),
            by_name("loraplex:adapter_in_flight", "gauge", "Requests in flight", lambda t: t.num_in_flight),
            _family(
                "loraplex:adapter_loads_total",
                "counter",
                "Loads of a version's weights into memory",
                [
                    f'loraplex:adapter_loads_total{{version="{seen.version}"}} {seen.loads}\n'
                    for seen in stats.adapters
                    if seen.loads
                ],
            ),
            _family(
                "loraplex:adapter_resident",
                "gauge",
                "1, with the tier the weights are in; not there for those on disk alone",
                _resident_lines(adapters, stats),
            ),
        ]
    ).encode()


def _resident_lines(adapters: Sequence[ServedAdapter], stats: EngineStats) -> list[str]:
    tiers = {seen.version: seen.tier for seen in stats.adapters if seen.tier != "disk"}
    return [
        f'loraplex:adapter_resident{{adapter="{adapter.name}",tier="{tiers[version]}",'
        f'version="{version}"}} 1\n'
        for adapter in adapters
        for version in sorted(adapter.versions)
        if version in tiers
    ]


def _family(name: str, kind: str, text: str, lines: Iterable[str]) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}"


def _ttft_lines(adapter: str, traffic: Traffic) -> str:
    name, histogram = "loraplex:adapter_ttft_seconds", traffic.ttft
    buckets = histogram.cumulative()
    lines = [f'{name}_bucket{{adapter="{adapter}",le="{bound}"}} {count}\n' for bound, count in buckets]
    lines.append(f'{name}_count{{adapter="{adapter}"}} {buckets[-1][1]}\n')
    lines.append(f'{name}_sum{{adapter="{adapter}"}} {histogram.total}\n')
    return "".join(lines)
