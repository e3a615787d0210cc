"""Prints the costs of a profile as a table, and warns of poor fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from loraplex.perf.cost_model import CostModel
    from loraplex.perf.least_squares import FitQuality
    from loraplex.perf.line import Line
    from loraplex.perf.step_cost import RowCurve

_POOR_R_SQUARED: Final = 0.5
_POOR_MEAN_ERROR: Final = 0.5
_LEAST_SAMPLES: Final = 5
"""Samples below which R² says nothing: their variance may be noise alone. The mean error stands for it."""


def print_costs(model: CostModel) -> None:
    """Print the fitted costs and the quality of each fit."""
    from rich.console import Console
    from rich.table import Table

    subject = model.subject
    console = Console(highlight=False)
    console.print(f"{subject.model}, {subject.dtype}, on {subject.machine}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("cost", "fitted", "samples", "R²", "mean error", "worst"):
        is_text = heading in ("cost", "fitted")
        table.add_column(heading, justify="left" if is_text else "right")
    for name, figures, quality in _rows(model):
        table.add_row(name, figures, *_quality(quality))
    console.print(table)


def warn_of_poor_fits(model: CostModel, advice: str) -> bool:
    """Print a warning and return True if a cost explains little of the measurements. `advice`: how to fix
    it."""
    known = {name.strip(): quality for name, _, quality in _rows(model) if quality is not None}
    few = {name: quality for name, quality in known.items() if quality.num_samples < _LEAST_SAMPLES}
    poor = [
        name
        for name, quality in known.items()
        if name not in few and not quality.r_squared >= _POOR_R_SQUARED
    ]
    far_off = [name for name, quality in few.items() if not quality.mean_error <= _POOR_MEAN_ERROR]
    found = [
        *([f"R² of {', '.join(poor)} is under {_POOR_R_SQUARED:g}"] if poor else []),
        *([f"the mean error of {', '.join(far_off)} is over {_POOR_MEAN_ERROR:.0%}"] if far_off else []),
    ]
    if found:
        typer.secho(
            f"warning: {', and '.join(found)}: other programs were probably running; {advice}",
            fg=typer.colors.YELLOW,
            err=True,
        )
    return bool(found)


def _rows(model: CostModel) -> Iterator[tuple[str, str, FitQuality | None]]:
    if model.bus is not None:
        launch = f", each copy more {model.bus.launch_s * 1e6:.1f} µs"
        yield "copy to the device", _line(model.bus.copy) + launch, model.bus.copy.quality
    yield "adapter in the page cache", _line(model.read), model.read.quality
    yield "file from disk", _line(model.disk), model.disk.quality
    yield "engine step that decodes", _curve(model.step.decodes), model.step.quality
    yield "  with prompts", _curve(model.step.prompts), None
    terms = model.step.terms
    yield (
        "  adapters in it",
        (
            f"{terms.lora_s * 1e3:.3f} ms for any, {terms.adapter_s * 1e6:.1f} µs each, "
            f"{terms.adapter_byte_s * 1e12:.1f} ms a GB"
        ),
        None,
    )
    yield "  1,000 positions", f"{terms.decode_position_s * 1e9:.2f} µs of every decode behind them", None
    assist = model.assist
    yield (
        "CPU LoRA task",
        f"{assist.call_s * 1e6:.1f} µs, {assist.row_s * 1e12:.1f} µs a million weights and row",
        assist.quality,
    )
    if model.held_out is not None:
        yield "held out: decode", "random steps that decode", model.held_out.decode
        yield "held out: prefill", "random prompts", model.held_out.prefill
        if model.held_out.serving is not None:
            yield "held out: serving", "steps while requests come and go", model.held_out.serving
        yield "held out: load", "adapters of other sizes", model.held_out.load


def _curve(curve: RowCurve) -> str:
    first, last = curve.seconds_at[0] * 1e3, curve.seconds_at[-1] * 1e3
    return f"{first:.2f} ms (rows: {curve.rows[0]}) to {last:.2f} ms ({curve.rows[-1]})"


def _line(line: Line) -> str:
    rate = line.units_per_s
    speed = "any amount" if rate is None else f"{rate / 1e9:.2f} GB/s"
    return f"{line.latency_s * 1e6:.1f} µs, then {speed}"


def _quality(quality: FitQuality | None) -> tuple[str, str, str, str]:
    if quality is None:
        return "", "", "", ""
    return (
        str(quality.num_samples),
        f"{quality.r_squared:.3f}" if quality.num_samples >= _LEAST_SAMPLES else "-",
        f"{quality.mean_error:.1%}",
        f"{quality.worst_error:.0%}",
    )
