"""Draw the committed traces of cold starts, one policy below the other on one time axis.

    python -m benchmarks.draw_timelines

Reads the section `timeline` of results/gpu_cold.json, writes docs/images/cold-start-timelines.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.trace_lanes import COMPUTE, COPIES, LANES, WAITS, WORKER_COPIES, WORKERS, Interval
from loraplex.core.cold_start import ColdStart

RESULTS: Final = Path(__file__).parent / "results" / "gpu_cold.json"
PICTURE: Final = Path("docs/images/cold-start-timelines.png")
_DPI: Final = 110
_SHOWN_GAPS: Final = 2.5
"""Number of usual gaps between tokens to show before the arrival."""


class TimelineError(Exception):
    """The results cannot be drawn."""


class Style(NamedTuple):
    """A lane's row, from the top, and the look of its bars. Rows and hatches tell lanes apart without
    colours."""

    row: int
    colour: str
    hatch: str = ""
    height: float = 0.7


STYLES: Final[dict[str, Style]] = {
    COPIES: Style(0, "#3b6fb6"),
    WAITS: Style(1, "#f2c14e", "////"),
    COMPUTE: Style(2, "#6a9f58"),
    WORKERS: Style(3, "#e6d5e8", "...."),
    WORKER_COPIES: Style(3, "#7b3f8c", height=0.3),
}
ROWS: Final = ("adapter copies", "waits on the device", "compute", "rows at CPU workers", "others' tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One policy's trace, in milliseconds since the arrival."""

    lanes: dict[str, list[Interval]]
    first_token_ms: float
    untraced_first_token_ms: float
    token_times_ms: list[float]
    usual_gap_ms: float
    longest_pause_ms: float | None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Timeline:
        return cls(
            lanes={name: _intervals_ms(found["lanes"][name]) for name in LANES},
            first_token_ms=found["first_token_us"] / 1e3,
            untraced_first_token_ms=found["untraced_first_token_us"] / 1e3,
            token_times_ms=[time_us / 1e3 for time_us in found["decode_token_times_us"]],
            usual_gap_ms=found["usual_gap_us"] / 1e3,
            longest_pause_ms=max(
                (end - begin for begin, end in _intervals_ms(found["pauses_us"])), default=None
            ),
        )

    @property
    def end_ms(self) -> float:
        ends = [end for lane in self.lanes.values() for _, end in lane]
        return max([self.first_token_ms, *self.token_times_ms, *ends])

    @property
    def summary(self) -> str:
        pause = f"{self.longest_pause_ms:.1f} ms" if self.longest_pause_ms is not None else "none"
        return (
            f"first token {self.first_token_ms:.1f} ms ({self.untraced_first_token_ms:.1f} untraced), "
            f"others' longest pause {pause} (a token each {self.usual_gap_ms:.1f} ms)"
        )


def read_section(path: Path) -> dict[str, Any]:
    """Return the section `timeline` of a results file, with its environment."""
    again = "measure it on a GPU: python -m benchmarks.gpu_cold timeline"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TimelineError(f"{path} cannot be read ({error.strerror}); {again}") from error
    except ValueError as error:
        raise TimelineError(f"{path} is not JSON: {error}") from error
    section = document.get("timeline") if isinstance(document, dict) else None
    if section is None:
        raise TimelineError(f"{path} holds no section 'timeline'; {again}")
    if not isinstance(section, dict) or not section.get("results", {}).get("policies"):
        raise TimelineError(f"the section 'timeline' of {path} holds no policies; {again}")
    return section


def timelines_of(section: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines by policy, in the order of the docs."""
    policies = section["results"]["policies"]
    found = {}
    for name in sorted(policies, key=lambda name: list(ColdStart).index(_policy(name))):
        try:
            found[name] = Timeline.from_json(policies[name])
        except (KeyError, TypeError, ValueError) as error:
            raise TimelineError(
                f"the trace of {name!r} in the section 'timeline' is not one: "
                f"{type(error).__name__} {error}; measure it again: python -m benchmarks.gpu_cold timeline"
            ) from error
    return found


def draw(section: Mapping[str, Any]) -> Figure:
    """Draw a panel for each policy."""
    timelines, title = timelines_of(section), _title(section)
    figure = Figure(figsize=(11, 0.8 + 1.65 * len(timelines)), layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0])
    for panel, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(panel, name, timeline)
    usual_ms = max(timeline.usual_gap_ms for timeline in timelines.values())
    end_ms = max(timeline.end_ms for timeline in timelines.values())
    panels[0].set_xlim(-_SHOWN_GAPS * usual_ms, 1.01 * end_ms)
    panels[-1].set_xlabel("milliseconds since the request arrived")
    figure.suptitle(title, fontsize=10)
    return figure


def save(section: Mapping[str, Any], path: Path) -> None:
    figure = draw(section)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI, format="png")


def _draw_panel(panel: Axes, name: str, timeline: Timeline) -> None:
    for lane, style in STYLES.items():
        panel.broken_barh(
            [(begin, end - begin) for begin, end in timeline.lanes[lane]],
            (style.row - style.height / 2, style.height),
            facecolor=style.colour,
            edgecolor="0.25",
            hatch=style.hatch,
            linewidth=0,  # an edge would make a wait of a microsecond look long
        )
    tokens_row = [len(ROWS) - 1] * len(timeline.token_times_ms)
    panel.plot(timeline.token_times_ms, tokens_row, "|", color="0.1", markersize=9, markeredgewidth=1.2)
    panel.axvline(0, color="0.1", linestyle="--", linewidth=1)
    panel.axvline(timeline.first_token_ms, color="0.1", linewidth=1.2)
    panel.plot([0, timeline.first_token_ms], [-0.75, -0.75], "v", color="0.1", markersize=6, clip_on=False)
    for text, time_ms in (("   arrival", 0.0), ("   first token", timeline.first_token_ms)):
        panel.text(time_ms, -0.72, text, fontsize=7, va="center")
    panel.set_yticks(range(len(ROWS)), list(ROWS), fontsize=8)
    panel.set_ylim(len(ROWS) - 0.5, -1.1)
    panel.set_title(name, loc="left", fontsize=10, fontweight="bold")
    panel.set_title(timeline.summary, loc="right", fontsize=8)
    panel.grid(axis="x", alpha=0.25, linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)


def _title(section: Mapping[str, Any]) -> str:
    try:
        found = section["results"]
        adapter_mb = next(iter(found["policies"].values()))["adapter_bytes"] / 1e6
        where = f"{section['shape']} on {section['machine'].get('gpu', 'no GPU')}, {section['date'][:10]}"
        return (
            f"{found['num_decoding']} requests decode; a prompt of {found['prompt_tokens']} tokens arrives, "
            f"its adapter of {adapter_mb:.1f} MB in host memory (cached: on the device)\n{where}, as traced"
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise TimelineError(f"the section 'timeline' does not say what was measured: {error!r}") from error


def _policy(name: str) -> ColdStart:
    try:
        return ColdStart(name)
    except ValueError as error:
        raise TimelineError(f"the section 'timeline' has a policy {name!r}, which there is not") from error


def _intervals_ms(intervals: Sequence[Sequence[float]]) -> list[Interval]:
    return [(begin / 1e3, end / 1e3) for begin, end in intervals]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args(arguments)
    try:
        save(read_section(args.results), args.out)
    except TimelineError as error:
        sys.exit(str(error))
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
