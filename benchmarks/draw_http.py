"""Draw throughput and time to first token over the number of adapters, loraplex beside vLLM.

    python -m benchmarks.draw_http            draw it
    python -m benchmarks.draw_http --check    exit 1 if the picture shows other figures (`make test`)

Reads results/http_compare.json, writes docs/images/http-compare.svg. The file contains a digest of the
figures that it shows, so that it can be checked with any version of matplotlib. A line joins two points only
if nothing between them was left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from benchmarks.http_plan import SATURATED, STEADY
from benchmarks.http_tables import LABELS, PICTURE, figure, numbers_of_adapters, servers

RESULTS: Final = Path(__file__).parent / "results"
_LOG_FROM: Final = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_MARGIN: Final = 1.12
"""The top of a panel relative to its largest value, so that marks are not cut."""
COLORS: Final = {"loraplex": "#3b6fb6", "vllm-lora": "#c0504d", "vllm": "#7f7f7f"}


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw the picture."""
    drawing = _panels(result)
    # Text stays text, and ids are the same in every drawing: equal figures make equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loraplex"}):
        drawing.savefig(picture, metadata={"Date": None, "Description": _digest(drawing)})


def is_drawn_from(result: dict[str, Any], picture: Path) -> bool:
    """Return whether a picture shows these figures."""
    return _digest(_panels(result)) in picture.read_text(encoding="utf-8")


def _panels(result: dict[str, Any]) -> Figure:
    """Return two panels: saturated throughput, and p95 of TTFT at a fixed rate."""
    drawing = Figure(figsize=(10.5, 3.6), layout="constrained")
    throughput, ttft = drawing.subplots(1, 2)
    loads = next(iter(servers(result).values()))["parameters"]["loads"]
    _draw(throughput, result, SATURATED, "output_tokens_per_s")
    throughput.set_title(f"output tokens/s, {loads[SATURATED]['concurrency']} requests at a time", fontsize=9)
    throughput.set_ylabel(f"tokens/s{_scale_of(throughput)}", fontsize=8)
    throughput.legend(loc="lower left", fontsize=8)
    _draw(ttft, result, STEADY, "ttft_ms_p95")
    rate = loads[STEADY]["requests_per_s"]
    ttft.set_title(f"time to the first token, ms, p95, {rate:g} requests/s", fontsize=9)
    ttft.set_ylabel(f"ms{_scale_of(ttft)}", fontsize=8)
    return drawing


def _scale_of(axis: Axes) -> str:
    return ", log scale" if axis.get_yscale() == "log" else ""


def _digest(drawing: Figure) -> str:
    """Return a hash of all titles and lines."""
    shown = [
        (
            axis.get_title(),
            [(line.get_label(), line.get_xdata(), line.get_ydata()) for line in axis.get_lines()],
        )
        for axis in drawing.axes
    ]
    text = json.dumps(shown, default=lambda values: np.asarray(values).tolist())
    return f"figures {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _draw(axis: Axes, result: dict[str, Any], load: str, name: str) -> None:
    found = servers(result)
    numbers = numbers_of_adapters(found.values())
    places = {number: place for place, number in enumerate(numbers)}
    for server, section in found.items():
        found_at = {number: figure(section, number, load, name) for number in numbers}
        # A line has a gap at NaN: it does not join numbers between which others were not measured.
        points = [
            (places[number], math.nan if value is None else value) for number, value in found_at.items()
        ]
        if all(math.isnan(value) for _, value in points):
            continue
        color = COLORS[server]
        if server == "vllm":  # it serves the base model only: one value, drawn across for comparison
            place, value = next(point for point in points if not math.isnan(point[1]))
            axis.axhline(value, color=color, linestyle="--", linewidth=1.2)
            axis.plot(place, value, "s", color=color, label=LABELS[server])
        else:
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=LABELS[server])
    values = np.concatenate([np.atleast_1d(line.get_ydata()) for line in axis.get_lines()])
    _scale(axis, values[~np.isnan(values)].tolist())
    axis.set_xticks(list(places.values()), ["base" if number == 0 else str(number) for number in numbers])
    axis.set_xlabel("adapters that requests ask for at random", fontsize=8)
    axis.grid(alpha=0.3)


def _scale(axis: Axes, values: Sequence[float]) -> None:
    """Start at 0, so that heights are proportional to values; use a log scale for values that are far
    apart."""
    if max(values) > _LOG_FROM * min(values):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(LogFormatter())
        axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2.0, 0.5)))
        axis.set_ylim(min(values) / _MARGIN, max(values) * _MARGIN)
    else:
        axis.set_ylim(0, max(values) * _MARGIN)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 if it would change")
    args = parser.parse_args()
    picture, result = Path(PICTURE), json.loads((RESULTS / "http_compare.json").read_text())
    if args.check:
        if not is_drawn_from(result, picture):
            sys.exit(f"{picture} is out of date; run python -m benchmarks.draw_http and commit the result")
        return
    draw(result, picture)
    print(f"{picture}: {picture.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
