"""Prints profiles: a list of them, or one in detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from loraplex.cli.table import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from loraplex.perf.named_profiles import Profile
    from loraplex.perf.profile_figures import DecodeFigures, ProfileFigures

_WIDE: Final = 1000
_HELD_OUT: Final = {"output tok/s": "output_tok_s", "ITL": "itl_s", "TTFT": "ttft_s"}


def print_profiles(profiles: Mapping[str, Profile]) -> None:
    """Print a line for each profile: its name, subject, and quality of fit."""
    from loraplex.perf.named_profiles import model_of

    table = _table(("name", "engine", "machine", "model", "mean error held out"))
    for name, profile in profiles.items():
        cells = (_engine(profile), _device(profile), _short(model_of(profile)), _fit(profile))
        table.add_row(_text(name, "bold"), *map(_text, cells))
    _print(table)


def facts_of(name: str, profile: Profile) -> dict[str, Any]:
    """Return what `print_profiles` prints of one, as JSON. `mean_error`: on held-out samples, as shares;
    empty if not measured."""
    from loraplex.perf.cost_model import CostModel
    from loraplex.perf.named_profiles import model_of

    return {
        "name": name,
        "engine": _engine(profile),
        "machine": _machine(profile),
        "model": model_of(profile),
        "dtype": profile.subject.dtype if isinstance(profile, CostModel) else None,
        "mean_error": _mean_errors(profile),
    }


def print_profile(name: str, profile: Profile) -> None:
    """Print a profile's subject, and its figures of steps, memory and loads."""
    from loraplex.perf.named_profiles import model_of
    from loraplex.perf.profile_figures import CONTEXT, PROMPT, RANK, SMALL_RANK, figures_of

    figures = figures_of(profile)
    facts = _table(("", ""), headings=False)
    for heading, words in (
        ("engine", f"{_engine(profile)}, on {_machine(profile)}"),
        ("model", model_of(profile) + _dtype(profile)),
        ("mean error held out", _fit(profile)),
        (f"prefill, {PROMPT:,} tokens", _prefill(figures, RANK)),
        ("KV memory", _memory(figures, RANK)),
        (f"load, rank {RANK}", _load(figures)),
    ):
        facts.add_row(_text(heading, "dim"), _text(words))
    steps = _table(
        ("requests", "base model", f"rank {RANK} each", f"ranks {SMALL_RANK} and {RANK}"), numbers=True
    )
    for each in figures.decodes:
        steps.add_row(*_cells(each, no_room=each.lora_s is None and figures.kv_tokens is not None))
    title = f"A decode step, ms, each request {CONTEXT} tokens long:"
    _print(_text(name, "bold"), facts, _text(""), _text(title), steps)


def _table(columns: Iterable[str], *, headings: bool = True, numbers: bool = False) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headings, header_style="dim")
    for heading in columns:
        table.add_column(heading, justify="right" if numbers else "left")
    return table


def _text(words: str, style: str = "") -> Text:
    """Return text without control characters or rich markup: profiles are untrusted data."""
    from rich.text import Text

    return Text(printable(words), style=style)


def _print(*parts: Text | Table) -> None:
    """Print parts. A pipe has no width, so its lines are not wrapped."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    for part in parts:
        console.print(part)


def _engine(profile: Profile) -> str:
    from loraplex.perf.cost_model import CostModel, KernelKind

    if not isinstance(profile, CostModel):
        return "slots (vLLM)"
    return "loraplex, padded kernels" if profile.kernels is KernelKind.PADDED else "loraplex"


def _machine(profile: Profile) -> str:
    from loraplex.perf.cost_model import CostModel

    return profile.subject.machine if isinstance(profile, CostModel) else profile.hardware


def _device(profile: Profile) -> str:
    """Return the machine without the CPU beside its GPU."""
    from loraplex.perf.cost_model import CostModel

    machine = _machine(profile)
    is_on_gpu = isinstance(profile, CostModel) and profile.subject.device == "cuda"
    return machine.partition(", ")[0] if is_on_gpu else machine


def _short(model: str) -> str:
    """Return the part of a shape up to its MLP width, which tells 7B and 8B apart; the rest is not for
    people."""
    return model.partition("-heads")[0]


def _dtype(profile: Profile) -> str:
    from loraplex.perf.cost_model import CostModel

    return f", {profile.subject.dtype}" if isinstance(profile, CostModel) else ""


def _fit(profile: Profile) -> str:
    from loraplex.perf.cost_model import CostModel, KernelKind

    if isinstance(profile, CostModel) and profile.kernels is KernelKind.PADDED:
        return "computed from kernels that do not pad"
    errors = _mean_errors(profile)
    return ", ".join(f"{name} {value:.1%}" for name, value in errors.items()) or "not measured"


def _mean_errors(profile: Profile) -> dict[str, float]:
    """Return the profile's mean errors on held-out samples, as shares."""
    from loraplex.perf.cost_model import CostModel, KernelKind

    if isinstance(profile, CostModel):
        held_out = profile.held_out
        if held_out is None or profile.kernels is KernelKind.PADDED:
            return {}
        parts = {"decode": held_out.decode, "prefill": held_out.prefill, "load": held_out.load}
        return {name: quality.mean_error for name, quality in parts.items()}
    known = {name: profile.quality.get(f"{key}_held_out_smape") for name, key in _HELD_OUT.items()}
    return {name: value / 100 for name, value in known.items() if value is not None}


def _prefill(figures: ProfileFigures, rank: int) -> str:
    words = f"{figures.prefill_tok_s:,.0f} tok/s"
    lora = figures.prefill_lora_tok_s
    return words if lora is None else f"{words}, {lora:,.0f} with an adapter of rank {rank}"


def _memory(figures: ProfileFigures, rank: int) -> str:
    if figures.kv_tokens is None:
        return "not measured"
    words = f"{figures.kv_tokens:,} tokens"
    taken = figures.adapter_tokens
    return f"{words}, of which an adapter of rank {rank} takes {taken:,}" if taken else words


def _load(figures: ProfileFigures) -> str:
    if figures.first_load_s is None:
        return "not measured"
    words = f"{figures.first_load_s * 1e3:,.1f} ms from its file"
    return words if figures.load_s is None else f"{figures.load_s * 1e3:,.1f} ms from host memory, {words}"


def _cells(each: DecodeFigures, *, no_room: bool) -> tuple[str, ...]:
    """Return a row of cells. `no_room`: memory does not hold this many adapters and requests."""
    nothing = "no room" if no_room else "-"
    times = (each.base_s, each.lora_s, each.mixed_s)
    return (str(each.num_requests), *(nothing if time is None else f"{time * 1e3:,.2f}" for time in times))
