"""The fleet's tables, from `results/fleet.json`."""

from __future__ import annotations

from benchmarks.markdown import Result, table


def decisions_table(result: Result) -> str:
    found = result["decisions"]["results"]
    sizes = list(found["routing_us"])
    wanted_us = {"60": "100", "1000": "2,000"}
    lines = [
        (f"routing, `{name}`, us", *(f"{found['routing_us'][size][name]['median']:,.0f}" for size in sizes))
        for name in found["routing_us"][sizes[0]]
    ]
    lines.append(("wanted, us", *(wanted_us.get(size, "") for size in sizes)))
    return table(("one decision, median", *(f"{int(size):,} replicas" for size in sizes)), lines)


def plans_table(result: Result) -> str:
    found = result["decisions"]["results"]
    lines = [
        (f"placing 40,000 adapters on 60 replicas, `{name}`", f"{each['median']:.2f} s", "1 s")
        for name, each in found["placement_s"].items()
    ]
    migration = found["migration_ms"]
    lines.append(("migration of 8 replicas and 500 requests", f"{migration['median']:.0f} ms", "100 ms"))
    return table(("", "median", "wanted"), lines)


def decisions_note(result: Result) -> str:
    found = result["decisions"]
    return (
        f"Measured {found['date'][:10]} on one core of {found['machine']['cpu']}, shared with others, commit "
        f"{found['git_commit'] or 'unknown'}. Costs are those of the profile of an H200.\n"
    )
