"""Shows the figures of tenants in a simulation."""

from __future__ import annotations

from typing import Any, Final

import typer

_MOST_SHOWN: Final = 20


def show_tenants(summary: dict[str, Any]) -> None:
    """Print a line for each tenant, those with the most requests first, and the index of fairness."""
    rows = summary.get("tenants", {})
    if refused := summary["num_refused"]:
        typer.echo(f"{refused:,} of {summary['num_requests']:,} requests refused")
    if not rows:
        return
    most = sorted(rows.items(), key=lambda each: -each[1]["num_requests"])
    for name, row in most[:_MOST_SHOWN]:
        ttft_s = row["ttft_p95_s"]
        ttft = "-" if ttft_s is None else f"{ttft_s * 1e3:,.0f} ms"
        typer.echo(
            f"tenant {name or '(none)'}: {row['num_served']:,} of {row['num_requests']:,} served, "
            f"{row['num_refused']:,} refused, TTFT p95 {ttft}, in time {row['attainment']:.1%} "
            f"({row['goodput_rps']:.2f}/s)"
        )
    if len(most) > _MOST_SHOWN:
        typer.echo(f"and {len(most) - _MOST_SHOWN:,} more tenants (--json has all)")
    typer.echo(f"fairness (Jain's index of what each got of its part): {summary['jain']:.3f}")
