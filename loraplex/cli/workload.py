"""`loraplex workload`: make, describe and plot workload files.

Imports of numpy and matplotlib are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli import workload_options as options
from loraplex.cli.early_stop import exit_on_sigterm
from loraplex.cli.flags import App
from loraplex.cli.json_out import check_picture, check_writable, write_json
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.workload.recipe import Recipe
    from loraplex.workload.request import Workload, WorkloadRequest
    from loraplex.workload.summary import WorkloadCounts, WorkloadSummary

app = App(help="Make workload files, say what is in them, draw them.", no_args_is_help=True)

_File = Annotated[Path, typer.Argument(help="A workload file, .jsonl or .jsonl.gz.", show_default=False)]
_SHOW_EVERY: Final = 10_000
_MOST_REQUESTS: Final = 100_000_000
"""Most requests of a file: about 8 GB, written in a quarter of an hour."""
_BESIDE_PAPER: Final = ("data", "rate", "duration_s", "num_adapters", "seed")


_PIPE_COLUMNS: Final = 100
"""Width of text in columns without a terminal, and the largest width on one."""


@app.command()
def make(
    out: Annotated[Path, typer.Argument(help="The file to write; .gz is compressed.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Equal seeds give equal files.")] = 0,
    paper: options.Paper = None,
    data: options.Data = None,
    duration_s: options.Duration = None,
    num_requests: options.NumRequests = None,
    rate: options.Rate = None,
    arrivals: options.Arrivals = None,
    cv: options.Cv = None,
    replay: options.Replay = None,
    num_adapters: options.NumAdapters = None,
    ranks: options.Ranks = None,
    popularity: options.Popularity = None,
    skew: options.Skew = None,
    popularity_file: options.PopularityFile = None,
    lengths: options.Lengths = None,
    prompt_tokens: options.PromptTokens = None,
    output_tokens: options.OutputTokens = None,
    prompt_sigma: options.PromptSigma = None,
    output_sigma: options.OutputSigma = None,
    lengths_file: options.LengthsFile = None,
    max_prompt_tokens: options.MaxPromptTokens = None,
    max_output_tokens: options.MaxOutputTokens = None,
    rates: options.Rates = None,
    change_every_s: options.ChangeEvery = None,
    change_factor: options.ChangeFactor = None,
    rate_least: options.RateLeast = None,
    rate_most: options.RateMost = None,
    from_: options.From = None,
    start_s: options.Start = None,
    functions_per_adapter: options.FunctionsPerAdapter = None,
    tenants: options.Tenants = None,
) -> None:
    """Draw a workload, or turn a trace into one."""
    given = locals()
    _write(_made(given), given["out"])


@app.command()
def papers(
    json_out: Annotated[Path | None, typer.Option("--json", help="Write them here, too.")] = None,
) -> None:
    """List the papers' workloads that `make --paper` knows, and where they differ from the papers'."""
    from shutil import get_terminal_size
    from textwrap import fill

    from loraplex.workload.papers import NAMED

    check_writable(json_out)
    rows = [
        {"name": each.name, "paper": each.paper, "what": each.what, "differs": each.differs}
        for each in NAMED.values()
    ]
    width = min(get_terminal_size((_PIPE_COLUMNS, 0)).columns, _PIPE_COLUMNS)
    for each in NAMED.values():
        typer.echo(f"{each.name} ({each.paper})")
        for text in (each.what, f"differs: {each.differs}"):
            typer.echo(fill(text, width, initial_indent="  ", subsequent_indent="    "))
    if json_out is not None:
        write_json(json_out, {"workloads": rows})


@app.command()
def describe(
    file: _File,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
) -> None:
    """Rates, burstiness, lengths, adapters and how skewed they are."""
    from loraplex.workload.summary import summarize

    check_writable(json_out, inputs=(file,))
    counts = _counted(file)
    summary = summarize(counts)
    _show(file, counts, summary)
    if json_out is not None:
        write_json(json_out, asdict(summary))


@app.command()
def plot(
    file: _File,
    out: Annotated[Path, typer.Argument(help="The PNG to write.", show_default=False)],
) -> None:
    """Draw arrivals over time, lengths, and popularity."""
    check_picture(out, "OUT", inputs=(file,))
    counts = _counted(file)
    from loraplex.bench.workload_plots import plot_workload

    plot_workload(counts, out, title=f"{file.name}: {_requests(counts.num_requests)}")
    typer.echo(f"drew {out}")


def _made(given: dict[str, Any]) -> Workload:
    from loraplex.workload.build import make_workload
    from loraplex.workload.recipe import RecipeError

    try:
        recipe = _recipe(given)
        _check_size(recipe)
        check_writable(given["out"], "OUT", inputs=recipe.files)
        return make_workload(recipe)
    except RecipeError as error:
        raise typer.BadParameter(error.reason, param_hint=_option_of(error.field)) from error


def _recipe(given: dict[str, Any]) -> Recipe:
    from loraplex.workload.papers import find_paper
    from loraplex.workload.recipe import Recipe, RecipeError

    if given["paper"] is None:
        if given["data"] is not None:
            raise RecipeError("data", "has an effect only with --paper")
        source, trace = given["from_"] or (None, None)
        asked = {name: value for name, value in given.items() if name not in ("out", "from_", "data")}
        return Recipe(source=source, trace=trace, **asked)
    named = find_paper(given["paper"])
    for name, value in given.items():
        if value is not None and name not in ("out", "paper", *_BESIDE_PAPER):
            beside = ", ".join(map(_option_of, _BESIDE_PAPER))
            raise RecipeError(name, f"is fixed in {named.name}; beside --paper there are {beside}")
    return named.recipe(**{name: given[name] for name in _BESIDE_PAPER})


def _option_of(field: str) -> str:
    return "--from" if field in ("source", "trace", "from_") else f"--{field.replace('_', '-')}"


def _write(workload: Workload, out: Path) -> None:
    from loraplex.workload.jsonl import write_workload

    with exit_on_sigterm():
        count = write_workload(out, _watched(workload, f"writing {out.name}"), workload.header)
    assert workload.header is not None, "what is made has a header"
    num_adapters = workload.header.num_adapters
    typer.echo(f"wrote {out}: {_requests(count)} for {num_adapters:,} {plural('adapter', num_adapters)}")


def _check_size(recipe: Recipe) -> None:
    """Raise RecipeError for a workload with too many requests to generate or store."""
    from loraplex.workload.build_parts import blaming
    from loraplex.workload.mix import parse_mix
    from loraplex.workload.recipe import DEFAULT_DURATION_S, DEFAULT_NUM_ADAPTERS, RecipeError

    if recipe.num_requests is not None:
        if recipe.num_requests > _MOST_REQUESTS:
            raise RecipeError("num_requests", f"must be at most {_MOST_REQUESTS:,}")
        return
    rate, name = recipe.rate, "rate"
    if recipe.rates is not None:
        name = "rates"
        with blaming(name):
            mix = parse_mix(recipe.rates, least=0)
        weighted = sum(value * weight for value, weight in zip(mix.values, mix.weights, strict=True))
        rate = weighted / sum(mix.weights) * (recipe.num_adapters or DEFAULT_NUM_ADAPTERS)
    duration_s = recipe.duration_s or DEFAULT_DURATION_S
    # A trace is finite.
    if recipe.source is None and recipe.replay is None and (rate or 0.0) * duration_s > _MOST_REQUESTS:
        raise RecipeError(
            name,
            f"{rate:g} requests/s for {duration_s:g} s are more than {_MOST_REQUESTS:,} requests; lower it, "
            "or give a shorter --duration-s or --num-requests",
        )


def _requests(number: int) -> str:
    return f"{number:,} {plural('request', number)}"


def _counted(file: Path) -> WorkloadCounts:
    from loraplex.workload.jsonl import WorkloadFile
    from loraplex.workload.summary import WorkloadCounts

    workload = WorkloadFile(file)
    counts = WorkloadCounts(header=workload.header)
    for request in _watched(workload, f"reading {file.name}"):
        counts.add(request)
    return counts


def _watched(workload: Workload, what: str) -> Iterator[WorkloadRequest]:
    """Yield the requests, while a line on the terminal counts them."""
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(what)) as status:
        for number, request in enumerate(workload):
            if number % _SHOW_EVERY == 0:
                status.update(f"{escape(what)}: {_requests(number)}")
            yield request


def _show(file: Path, counts: WorkloadCounts, summary: WorkloadSummary) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    facts = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, value in _facts(counts, summary):
        facts.add_row(name, Text(value, overflow="fold"))
    lengths = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tokens", "mean", "p50", "p90", "p95", "p99", "max"):
        lengths.add_column(heading, justify="left" if heading == "tokens" else "right")
    for name, of in (("prompt", summary.prompt), ("output", summary.output)):
        percentiles = (of.p50, of.p90, of.p95, of.p99, of.most)
        lengths.add_row(name, f"{of.mean:,.1f}", *(f"{value:,}" for value in percentiles))
    console.print(Text(file.name))
    console.print(facts)
    console.print(lengths)


def _facts(counts: WorkloadCounts, summary: WorkloadSummary) -> Iterator[tuple[str, str]]:
    yield "requests", f"{summary.num_requests:,} in {summary.duration_s:,.1f} s"
    busiest = f"{summary.busiest_per_s:,.1f} in the busiest {summary.busiest_width_s:g} s"
    yield "per second", f"{_number(summary.rate_per_s)}, {busiest}"
    yield "CV of gaps", f"{_number(summary.gap_cv)} (Poisson: 1)"
    tokens = f"{_number(summary.prompt_tokens_per_s)} in, {_number(summary.output_tokens_per_s)} out"
    yield "tokens/s", tokens
    known = "" if summary.num_adapters is None else f" of {summary.num_adapters:,}"
    yield "adapters", f"{summary.num_adapters_used:,}{known} used"
    shares = f"busiest {summary.busiest_adapter_share:.1%}, busiest tenth {summary.busiest_tenth_share:.1%}"
    yield "skew", f"{shares}, half of the requests for {summary.num_adapters_for_half:,}"
    if summary.rank_shares is not None:
        yield "ranks", ", ".join(f"{rank}: {share:.1%}" for rank, share in summary.rank_shares.items())
    if counts.header is not None and counts.header.recipe:
        yield "made of", ", ".join(f"{key} {value}" for key, value in counts.header.recipe.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
