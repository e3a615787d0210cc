"""`loraplex profile`: measure the costs of an engine on this machine, for scheduling and simulation.

Imports of torch are deferred until the command runs, to keep `--help` fast.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.cli.flags import App
from loraplex.cli.json_out import check_writable
from loraplex.cli.profile_names import find_given_profile
from loraplex.cli.profile_table import print_costs, warn_of_poor_fits
from loraplex.cli.server_calls import AsJson
from loraplex.core.progress import in_words, shown_progress

if TYPE_CHECKING:
    import torch

    from loraplex.bench.profile_scenarios import ProfileOptions
    from loraplex.model.config import ModelConfig

_CPU_S: Final = (10 * 60, 2 * 3600)
"""Seconds on two cores for a tiny model, and for one of 100 million parameters."""
_QUICK_S: Final = 120.0
_EXIT_INTERRUPTED: Final = 130
"""Exit code of an interrupted command."""
_MODEL_FILES: Final = ("config.json", "generation_config.json")
"""Files that are read in a model's folder."""

app = App(help="What things cost: measured on this machine, fitted to recorded runs, or known by name.")


@app.callback(invoke_without_command=True)
def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hugging Face id; of its weights nothing but the sizes is used."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Instead of --model: llama-2-7b, ... or tiny. Default: llama-2-7b on a GPU, or tiny."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32; auto: what `serve` would take.")
    ] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="On a CPU: threads to measure with; all cores by default.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Measurements of each kind; default: 3 on a GPU, 25 on a CPU.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Take about two minutes: fewer kinds of steps, fewer times, a rougher profile."
        ),
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the profile here, not where `serve` looks for it.")
    ] = None,
) -> None:
    """Measure copies, reads, engine steps and CPU LoRA, and fit the cost model to them."""
    if context.invoked_subcommand is not None:
        return
    from loraplex.bench.environment import ENGINE_PACKAGES, environment
    from loraplex.bench.profile_scenarios import ProfileOptions, profile_machine
    from loraplex.engine.profile_subject import profile_path
    from loraplex.perf.profile_json import write_profile

    if model is not None and shape is not None:
        raise typer.BadParameter("give --model or --shape, not both", param_hint="--shape")
    if quick and repeats is not None:
        raise typer.BadParameter("--quick decides the repeats itself", param_hint="--repeats")
    folder = Path(model or "").expanduser()
    check_writable(json_out, inputs=() if model is None else tuple(folder / name for name in _MODEL_FILES))
    config, device, chosen = _resolve(model, shape, device, dtype, threads)
    name = _short_name(model) or shape or "a random model"
    options = ProfileOptions(
        config=config, device=device, dtype=chosen, repeats=repeats, quick_s=_QUICK_S if quick else None
    )
    try:
        with shown_progress(f"measuring {name}", expected=_expected(options)) as progress:
            found = profile_machine(options, progress)
    except KeyboardInterrupt:
        typer.echo("stopped: nothing was kept of what was measured", err=True)
        raise typer.Exit(_EXIT_INTERRUPTED) from None
    print_costs(found)
    if quick:
        typer.echo("this is a rough profile; one without --quick takes its place when it is written")
    warn_of_poor_fits(found, "run this again when the machine is idle")
    path = json_out or profile_path(found.subject)
    write_profile(path, found, environment(ENGINE_PACKAGES))
    if json_out is None:
        typer.echo(f"this profile is in use from now on: {path}; delete it to go back to guesses")
    else:
        typer.echo(f"wrote {path}")


@app.command()
def fit(
    runs: Annotated[list[Path], typer.Option(help="Recorded runs (CSV or .csv.gz); may be given again.")],
    out: Annotated[Path, typer.Option(help="Write the profile here.")],
    model: Annotated[
        str | None, typer.Option(help="Of the runs' models, the one to fit; needed if there are several.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="What they ran on, in your own words.")] = "one GPU",
) -> None:
    """Fit a profile of an engine with slots (vLLM) to recorded runs of it."""
    from loraplex.bench.environment import environment
    from loraplex.core.errors import UserError
    from loraplex.perf.slot_profile import write_slot_profile
    from loraplex.twin.recorded_runs import read_runs
    from loraplex.twin.validate import fit as fit_profiles

    check_writable(out, "--out", inputs=tuple(runs))
    files = [read_runs(path) for path in runs]
    models = sorted({setup.model for file in files for setup in file.setups})
    if model is None and len(models) != 1:
        if not models:
            raise UserError("no run says at which rates requests came: there is nothing to fit to")
        raise UserError(f"runs of {len(models)} models: {', '.join(models)}; choose one with --model")
    expected = "some minutes; an upper bound follows"
    with shown_progress("fitting", expected=expected, left="at most") as progress:
        fitted = fit_profiles(files, [model or models[0]], hardware=hardware, progress=progress)
    found = fitted.profiles[model or models[0]]
    for name, value in found.quality.items():
        typer.echo(f"{name:32} {value:8.3f}")
    write_slot_profile(out, found, environment(("loraplex", "numpy", "numba")))
    typer.echo(f"wrote {out}")


@app.command("list")
def list_profiles(as_json: AsJson = False) -> None:
    """List the profiles that come with loraplex: what they are of, and how well they fit."""
    from loraplex.cli.profile_show import facts_of, print_profiles
    from loraplex.perf.named_profiles import named_profiles

    profiles = named_profiles()
    if as_json:
        typer.echo(json.dumps([facts_of(name, each) for name, each in profiles.items()], indent=2))
    else:
        print_profiles(profiles)


@app.command()
def show(
    profile: Annotated[Path, typer.Argument(metavar="NAME|PATH", help="One of `profile list`, or a file.")],
    as_json: AsJson = False,
) -> None:
    """Tell what a profile says of steps, memory and loads."""
    from loraplex.cli.profile_show import facts_of, print_profile
    from loraplex.perf.profile_figures import figures_of

    found = find_given_profile(profile)
    if as_json:
        typer.echo(json.dumps(facts_of(profile.name, found) | asdict(figures_of(found)), indent=2))
    else:
        print_profile(profile.name, found)


def _resolve(
    model: str | None, shape: str | None, device: str, dtype: str, threads: int | None
) -> tuple[ModelConfig, str, torch.dtype]:
    """Return the model, device and dtype to measure, with the same defaults as `serve`."""
    import torch

    from loraplex.bench.random_engine import check_shape
    from loraplex.engine.build import choose_device, choose_dtype
    from loraplex.engine.cpu_threads import default_threads
    from loraplex.engine.options import EngineOptions
    from loraplex.model.config import load_config
    from loraplex.model.shapes import config_of_shape
    from loraplex.model.source import resolve_model

    device = choose_device(EngineOptions(model=model or "", device=device, num_threads=threads))
    if device == "cpu":
        torch.set_num_threads(default_threads() if threads is None else threads)
    if model is not None:
        config = load_config(resolve_model(model))
    else:
        shape = shape or ("llama-2-7b" if device == "cuda" else "tiny")
        check_shape(shape, device)
        config = config_of_shape(shape)
    return config, device, choose_dtype(dtype, device, config)


def _expected(options: ProfileOptions) -> str:
    """Return an estimate of the duration in words; nothing is known about the machine yet."""
    from loraplex.bench.profile_scenarios import CPU_REPEATS

    follows = "an estimate follows once 1% is measured"
    if options.quick_s is not None:
        return f"about two minutes, longer for models whose steps take seconds; {follows}"
    if options.device != "cpu":
        return f"some minutes, longer for larger models; {follows}"
    rounds, default_rounds = (options.repeats or CPU_REPEATS) + 1, CPU_REPEATS + 1
    least, most = (in_words(each * rounds / default_rounds) for each in _CPU_S)
    fewer = "; --quick takes two minutes, and fits less closely" if options.repeats is None else ""
    return (
        f"on two cores, some {least} for a tiny model and {most} for one of 100 million parameters, longer "
        f"while other programs run{fewer}; {follows}"
    )


def _short_name(model: str | None) -> str | None:
    """Return a folder's own name: its whole path would not fit on the progress line."""
    if model is None or not os.path.isdir(model):
        return model
    return Path(model).resolve().name
