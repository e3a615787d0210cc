"""Draw the twin beside our own engine, measure by measure, from idle to overload.

    python -m benchmarks.draw_twin

Reads results/twin_engine_cuda.json and twin_engine_cpu.json, writes docs/images/twin-engine.png.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.twin_tables import mean_workloads

RESULTS: Final = Path(__file__).parent / "results"
PICTURE: Final = Path("docs/images/twin-engine.png")
MACHINES: Final = {"H200, 7B": "twin_engine_cuda.json", "CPU, tiny model": "twin_engine_cpu.json"}
MEASURES: Final = {
    "output_tok_s": "output tokens/s",
    "itl_ms": "gap between tokens, ms",
    "ttft_ms": "time to the first token, ms",
}
_DPI: Final = 110


def draw(results: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draw the results, which are given by the machine's name."""
    figure = Figure(figsize=(10.5, 3.1 * len(results)), layout="constrained")
    axes = figure.subplots(len(results), len(MEASURES), squeeze=False)
    for row, (machine, result) in zip(axes, results.items(), strict=True):
        for axis, (measure, label) in zip(row, MEASURES.items(), strict=True):
            _draw_measure(axis, mean_workloads(result), measure)
            axis.set_title(f"{machine}: {label}", fontsize=9)
    axes[0][0].legend(loc="upper left", fontsize=8)
    figure.savefig(picture, dpi=_DPI)


def _draw_measure(axis: Axes, workloads: list[dict[str, Any]], measure: str) -> None:
    loads = [100 * each["load"] for each in workloads]
    twin, live = ([each[side][measure] for each in workloads] for side in ("twin", "live"))
    axis.plot(loads, twin, "-", color="#3b6fb6", label="twin")
    axis.plot(loads, live, "o", color="#c0504d", markerfacecolor="none", label="engine")
    if measure == "ttft_ms":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("load, % of what the twin says can be served", fontsize=8)
    axis.grid(alpha=0.3)


def main() -> None:
    draw({name: json.loads((RESULTS / file).read_text()) for name, file in MACHINES.items()}, PICTURE)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
