"""`loraplex plan train`: surrogates of the twin.

Imports are deferred until the command runs, to keep `--help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.cli.durations import Duration, duration_option
from loraplex.cli.json_out import check_writable, files_saved, save_text
from loraplex.cli.plan_demand import check_finite
from loraplex.cli.twin_options import ProfilePath, read_profile_of
from loraplex.core.errors import UserError
from loraplex.core.progress import shown_progress

if TYPE_CHECKING:
    from loraplex.planner.surrogate import Surrogate

_TRAINED_BY: Final = ("loraplex", "numpy", "scikit-learn")
"""Packages whose versions a surrogate records."""


def train(
    profile: ProfilePath,
    out: Annotated[Path, typer.Option(help="Write the surrogate to this file.")],
    dataset: Annotated[
        Path, typer.Option(help="The simulated runs; continued if the file has some of them already.")
    ],
    mean_prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of a prompt.")],
    mean_output_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of an answer.")],
    rows: Annotated[
        int, typer.Option(min=150, max=10_000_000, help="How many runs; there are 290,400 points.")
    ] = 2000,
    seconds: Annotated[
        Duration, duration_option("--seconds", least=60, text="The simulated time of each run.")
    ] = Duration(3600),
    mean_lengths: Annotated[
        bool, typer.Option("--mean-lengths", help="All requests have the mean lengths, as in the paper.")
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="One tree of at most 32 rules each, instead of a forest.")
    ] = False,
    paper_search: Annotated[
        bool, typer.Option("--paper-search", help="Search all of the paper's options, which takes hours.")
    ] = False,
    rules: Annotated[
        Path | None,
        typer.Option(
            help="Write the rules to this file, to be read, or as Python if it ends in .py; with --small."
        ),
    ] = None,
) -> None:
    """Train a surrogate of an engine with slots: a file that answers in microseconds what the twin simulates.

    Runs are simulated on all cores until the dataset has so many; interrupted, the same command goes on.
    """
    if rules is not None and not small:
        raise typer.BadParameter("a forest has too many rules to read; give --small", param_hint="--rules")
    check_finite(mean_prompt_tokens=mean_prompt_tokens, mean_output_tokens=mean_output_tokens)
    check_writable(out, "--out", inputs=(profile, dataset))
    check_writable(rules, "--rules", inputs=(profile, dataset, out))
    from loraplex.bench.environment import environment
    from loraplex.perf.slot_profile import SlotProfile
    from loraplex.planner.dataset import Simulated, make_dataset, read_dataset
    from loraplex.planner.searches import Search
    from loraplex.planner.surrogate_json import write_surrogate
    from loraplex.planner.traffic import LengthsOf
    from loraplex.planner.training import require_scikit_learn, train_forest, train_small_tree
    from loraplex.twin.run_workload import Lengths

    found = read_profile_of(profile, None)
    if not isinstance(found, SlotProfile):
        raise UserError(
            "the profile is of an engine without slots; `plan make` computes from it what a GPU serves, "
            "without training"
        )
    require_scikit_learn()
    simulated = Simulated(
        profile=found,
        profile_name=str(profile),
        lengths=Lengths(mean_prompt_tokens, mean_output_tokens),
        lengths_of=LengthsOf.MEAN if mean_lengths else LengthsOf.DRAWN,
        duration_s=float(seconds),
    )
    with shown_progress("simulating runs") as report:
        make_dataset(dataset, simulated, num_rows=rows, progress=report)
    search = Search.PAPER if paper_search else None
    with shown_progress("training", left=None) as report:
        train_one = train_small_tree if small else train_forest
        trained = train_one(read_dataset(dataset), search, progress=report)
    with files_saved(
        (out, lambda path: write_surrogate(path, trained, environment(_TRAINED_BY))),
        (rules, lambda path: _save_rules(path, trained)),
    ):
        _show_accuracy(trained)


def _save_rules(path: Path, surrogate: Surrogate) -> None:
    from loraplex.planner.rules_file import SUFFIX, rules_as_python, rules_as_text

    save_text(path, (rules_as_python if path.suffix == SUFFIX else rules_as_text)(surrogate))


def _show_accuracy(surrogate: Surrogate) -> None:
    accuracy = surrogate.accuracy
    typer.echo(
        f"on {accuracy['num_held_out']:,.0f} runs that it was not trained on: throughput "
        f"{accuracy['throughput_smape_authors_unit']:.2f}% off (the paper's SMAPE, half of ours), starvation "
        f"macro-F1 {accuracy['starvation_macro_f1']:.3f}"
    )
