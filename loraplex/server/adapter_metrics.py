"""The part of the /metrics page that grows with the adapters in use.

An adapter that was never requested and whose weights are only on disk has no series: thousands of adapters
may be registered. If thousands are requested, the first `MAX_NAMED` have their own series and all others
share one, so that the page has a bounded size. Request figures are labelled by name. Figures on weights are
labelled by version, which several names may share; `adapter_resident` has both.

The text is formatted by hand: a sample object of the Prometheus library costs many times as much as its line.
Names and versions of adapters need no escaping.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

from loraplex.core.stats import EngineStats
from loraplex.server.metrics import ServerMetrics, Traffic
from loraplex.server.served_adapter import ServedAdapter
from loraplex.server.tenants.objective import attainment

MAX_NAMED: Final = 256
"""Number of adapters with their own series; each has about twenty."""
OTHERS: Final = "(others)"
"""Label for all other adapters; no adapter can have this name."""


def render_adapters(
    adapters: Sequence[ServedAdapter],
    metrics: ServerMetrics,
    stats: EngineStats,
    holders: Callable[[str], Sequence[int]] | None = None,
) -> bytes:
    """Return the series of served adapters that were requested or are in memory. `holders`: the replicas of a
    fleet that have a version in memory; None for a single engine."""
    named, folded = _share_out(adapters, metrics, stats)
    used = [
        (adapter.name, traffic)
        for adapter in named
        if (traffic := metrics.find_traffic(adapter.name)) is not None
    ]
    if folded:
        used.append((OTHERS, Traffic.sum_of(metrics.find_traffic(adapter.name) for adapter in folded)))
    own_versions = {version for adapter in named for version in adapter.versions}
    folded_versions = {version for adapter in folded for version in adapter.versions} - own_versions

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
                    for each in named
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
            _family(
                "loraplex:adapter_slo_requests_total",
                "counter",
                "Requests with an objective, by target and whether they reached it",
                [line for name, traffic in used for line in _slo_lines(name, traffic)],
            ),
            by_name("loraplex:adapter_in_flight", "gauge", "Requests in flight", lambda t: t.num_in_flight),
            _family(
                "loraplex:adapter_loads_total",
                "counter",
                "Loads of a version's weights into memory",
                _load_lines(stats, folded_versions),
            ),
            _family(
                "loraplex:adapter_resident",
                "gauge",
                "1, with the tier the weights are in; not there for those on disk alone",
                _resident_lines(named, stats),
            ),
            "" if holders is None else _replica_family(named, holders),
            _family(
                "loraplex:adapter_versions",
                "gauge",
                "Versions of adapters by the tier that their weights are in",
                [
                    f'loraplex:adapter_versions{{tier="{tier}"}} {count}\n'
                    for tier, count in sorted(Counter(seen.tier for seen in stats.adapters).items())
                ],
            ),
        ]
    ).encode()


def _share_out(
    adapters: Sequence[ServedAdapter], metrics: ServerMetrics, stats: EngineStats
) -> tuple[list[ServedAdapter], list[ServedAdapter]]:
    """Return the adapters with their own series, and those that share one. Requested adapters come first, in
    the order of their first requests, so an adapter keeps its series."""
    seen = {each.version for each in stats.adapters if each.tier != "disk" or each.loads}
    order = {name: number for number, name in enumerate(metrics.names)}
    shown = [
        each for each in adapters if each.name in order or each.canary or not seen.isdisjoint(each.versions)
    ]
    shown.sort(key=lambda each: order.get(each.name, len(order)))
    return shown[:MAX_NAMED], shown[MAX_NAMED:]


def _load_lines(stats: EngineStats, folded_versions: Set[str]) -> list[str]:
    name = "loraplex:adapter_loads_total"
    lines = [
        f'{name}{{version="{seen.version}"}} {seen.loads}\n'
        for seen in stats.adapters
        if seen.loads and seen.version not in folded_versions
    ]
    if folded_versions:
        num_others = sum(seen.loads for seen in stats.adapters if seen.version in folded_versions)
        lines.append(f'{name}{{version="{OTHERS}"}} {num_others}\n')
    return lines


def _resident_lines(adapters: Sequence[ServedAdapter], stats: EngineStats) -> list[str]:
    tiers = {seen.version: seen.tier for seen in stats.adapters if seen.tier != "disk"}
    return [
        f'loraplex:adapter_resident{{adapter="{adapter.name}",tier="{tiers[version]}",'
        f'version="{version}"}} 1\n'
        for adapter in adapters
        for version in sorted(adapter.versions)
        if version in tiers
    ]


def _replica_family(adapters: Sequence[ServedAdapter], holders: Callable[[str], Sequence[int]]) -> str:
    name = "loraplex:adapter_on_replica"
    lines = [
        f'{name}{{adapter="{adapter.name}",replica="{replica}",version="{version}"}} 1\n'
        for adapter in adapters
        for version in sorted(adapter.versions)
        for replica in holders(version)
    ]
    return _family(name, "gauge", "1 for each replica that has the weights in its memory", lines)


def _family(name: str, kind: str, text: str, lines: Iterable[str]) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}"


def _slo_lines(adapter: str, traffic: Traffic) -> Iterable[str]:
    name = "loraplex:adapter_slo_requests_total"
    for target, result, count in () if traffic.num_reached is None else attainment(traffic.num_reached):
        yield f'{name}{{adapter="{adapter}",result="{result}",target="{target}"}} {count}\n'


def _ttft_lines(adapter: str, traffic: Traffic) -> str:
    name, histogram = "loraplex:adapter_ttft_seconds", traffic.ttft
    buckets = histogram.cumulative()
    lines = [f'{name}_bucket{{adapter="{adapter}",le="{bound}"}} {count}\n' for bound, count in buckets]
    lines.append(f'{name}_count{{adapter="{adapter}"}} {buckets[-1][1]}\n')
    lines.append(f'{name}_sum{{adapter="{adapter}"}} {histogram.total}\n')
    return "".join(lines)
