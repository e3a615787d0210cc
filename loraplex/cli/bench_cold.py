"""`loraplex bench engine cold`: the cost of a request whose adapter is not on the device, by policy.

Imports of torch are deferred until the command runs, to keep `--help` fast.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli import bench_engine as shared
from loraplex.cli.json_out import check_picture
from loraplex.core.cold_start import ColdStart
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.adapters.spec import AdapterSpec
    from loraplex.bench.cold_scenarios import MakeSpecs, PolicyFigures
    from loraplex.bench.distribution import Distribution
    from loraplex.workload.jsonl import WorkloadRequest

_NO_FILES: Final = "no files"
"""Tier of an adapter before its first request on a CPU, which has no tier between disk and the engine."""
_ON_A_CPU: Final = (ColdStart.CACHED, ColdStart.ON_DEMAND, ColdStart.OVERLAP)


def cold(
    shape: shared.Shape = "auto",
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    workload: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file to replay, every request on an adapter of its own (see `serve`)."),
    ] = None,
    policies: Annotated[
        list[ColdStart] | None,
        typer.Option("--policy", help="One to compare with `cached`; may be repeated. All by default."),
    ] = None,
    files: Annotated[
        bool, typer.Option(help="Adapters are files in a temporary folder: begin on disk, too.")
    ] = False,
    num_adapters: Annotated[int, typer.Option(min=1, help="Adapters tried on an idle engine.")] = 20,
    burst: Annotated[int, typer.Option(min=0, help="Requests that come at once; 0 for no burst.")] = 0,
    rank: shared.Rank = 64,
    modules: shared.Modules = "q,k,v",
    prompt_tokens: shared.Prompt = 128,
    plot: Annotated[Path | None, typer.Option(help="Draw the comparison of a workload to this PNG.")] = None,
    json_out: shared.Json = None,
) -> None:
    """Time to first token of cold adapters on an idle engine; with a workload, what each policy adds."""
    from loraplex.engine.machine import max_threads
    from loraplex.perf.assist_split import default_num_workers
    from loraplex.workload.jsonl import read_workload

    if plot is not None and workload is None:
        raise typer.BadParameter("what is drawn comes of a --workload", param_hint="--plot")
    check_picture(plot, inputs=() if workload is None else (workload,))
    requests = None if workload is None else read_workload(workload)
    with ExitStack() as stack:
        on_gpu = shared.resolved(locals())["device"] == "cuda"
        chosen = _policies(policies, on_gpu=on_gpu, files=files)
        num_workers = default_num_workers(max_threads()) if ColdStart.CPU_ASSIST in chosen else None
        options = locals() | {"ranks": "", "from_files": files, "cpu_workers": num_workers}
        bench = shared.set_up(options, num_adapters=0)
        bench.parameters["num_adapters"] = num_adapters
        if requests is not None and workload is not None:
            shared.check_lengths(requests, workload, bench.engine.max_model_len)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loraplex-"))) if files else None
        most = max(num_adapters + 1, burst, len(requests or ()))
        make_specs = _maker(bench.parameters, most, folder)
        load = "" if requests is None else f", a workload of {len(requests)} on one adapter each"
        shared.describe(bench, f"{prompt_tokens} prompt tokens on an idle engine{load}")
        bench.engine.warm_up()
        results = _idle(bench, chosen, make_specs, num_adapters, prompt_tokens, files)
        if burst > 0:
            results["burst"] = _burst(bench, chosen, make_specs, burst, prompt_tokens)
        if requests is not None and workload is not None:
            bench.parameters.update(workload=workload.name, workload_adapters=len(requests))
            results["workload"] = _replayed(bench, chosen, make_specs, requests, plot)
        bench.engine.close()
    shared.write(bench, json_out, results)


def _policies(asked: Sequence[ColdStart] | None, *, on_gpu: bool, files: bool) -> list[ColdStart]:
    if ColdStart.CPU_ASSIST in (asked or ()) and on_gpu and not files:
        raise typer.BadParameter("cpu-assist computes with adapters from --files", param_hint="--policy")
    if not on_gpu:
        return _policies_on_a_cpu(asked)
    possible = [policy for policy in ColdStart if files or policy is not ColdStart.CPU_ASSIST]
    return list(dict.fromkeys((ColdStart.CACHED, *(asked or possible))))


def _policies_on_a_cpu(asked: Sequence[ColdStart] | None) -> list[ColdStart]:
    """Return the policies that a CPU supports. Others are refused if given, or listed as left out."""
    need_a_gpu = [policy for policy in ColdStart if policy not in (*_ON_A_CPU, ColdStart.AUTO)]
    for policy in asked or ():
        if policy in need_a_gpu:
            raise typer.BadParameter(
                f"{policy} needs a GPU; on a CPU there are {', '.join(_ON_A_CPU)}", param_hint="--policy"
            )
    if not asked:
        typer.echo(f"left out on a CPU: {', '.join(need_a_gpu)}, which need a GPU; auto, which is overlap")
    elif ColdStart.AUTO in asked:
        typer.echo("on a CPU, auto is overlap")
    chosen = [ColdStart.OVERLAP if policy is ColdStart.AUTO else policy for policy in asked or _ON_A_CPU]
    return list(dict.fromkeys((ColdStart.CACHED, *chosen)))


def _maker(parameters: Mapping[str, Any], most: int, folder: Path | None) -> MakeSpecs:
    from loraplex.bench.random_engine import random_specs
    from loraplex.core.modules import module_names

    shape, rank, modules = parameters["shape"], parameters["rank"], parameters["modules"]
    if folder is None:
        return lambda name, count: random_specs(
            name, shape, num_adapters=count, ranks=[rank], modules=modules
        )
    from loraplex.bench.adapter_files import save_random_adapters
    from loraplex.engine.build import DTYPES
    from loraplex.model.shapes import config_of_shape

    saved: list[AdapterSpec] = save_random_adapters(
        folder,
        config_of_shape(shape).shape,
        DTYPES[parameters["dtype"]],
        count=most,
        rank=rank,
        modules=module_names(modules),
    )
    return lambda name, count: saved[:count]


def _idle(
    bench: shared.Bench,
    policies: Sequence[ColdStart],
    make_specs: MakeSpecs,
    num_adapters: int,
    prompt_tokens: int,
    files: bool,
) -> dict[str, Any]:
    from loraplex.bench.cold_scenarios import measure_idle

    on_gpu = bench.parameters["device"] == "cuda"
    starts = [*(["disk"] if files else []), *(["host"] if on_gpu else [])] or [_NO_FILES]
    found = measure_idle(
        bench.engine,
        policies,
        make_specs,
        starts=starts,
        num_adapters=num_adapters,
        prompt_tokens=prompt_tokens,
        vocab_size=bench.vocab_size,
    )
    columns = [*starts, "ready"]
    rows = [
        (policy, *(_mean_p95(figures.get(column)) for column in columns)) for policy, figures in found.items()
    ]
    _print_table("First token on an idle engine, ms: mean (p95)", ("policy", *columns), rows)
    if _NO_FILES in starts:
        typer.echo(f"{_NO_FILES}: weights are made at random in memory when first asked for; read: --files")
    return {
        "idle_ttft_ms": {
            policy: {where: _rounded(distribution) for where, distribution in figures.items()}
            for policy, figures in found.items()
        }
    }


def _burst(
    bench: shared.Bench, policies: Sequence[ColdStart], make_specs: MakeSpecs, size: int, prompt_tokens: int
) -> dict[str, Any]:
    from loraplex.bench.cold_scenarios import burst

    found = burst(
        bench.engine,
        policies,
        make_specs,
        size=size,
        prompt_tokens=prompt_tokens,
        vocab_size=bench.vocab_size,
    )
    cached = found[ColdStart.CACHED].p95
    rows = [(policy, _mean_p95(times), f"{times.p95 / cached:.2f}x") for policy, times in found.items()]
    headings = ("policy", "TTFT ms, mean (p95)", "p95 over cached")
    _print_table(f"{size} {plural('request', size)} at once, each on a cold adapter", headings, rows)
    return {
        policy: _rounded(times) | {"p95_over_cached": round(times.p95 / cached, 3)}
        for policy, times in found.items()
    }


def _replayed(
    bench: shared.Bench,
    policies: Sequence[ColdStart],
    make_specs: MakeSpecs,
    requests: Sequence[WorkloadRequest],
    plot: Path | None,
) -> dict[str, Any]:
    from loraplex.bench.cold_scenarios import METRICS, compare_policies

    found = compare_policies(bench.engine, policies, requests, make_specs, bench.vocab_size)
    rows = [
        (
            policy,
            *(_overhead(figures, metric) for metric in METRICS),
            f"{figures.itl_p99_overhead:+.1%}",
            f"{figures.interruptions_per_request:.2f}",
        )
        for policy, figures in found.items()
    ]
    headings = ("policy", "TTFT", "TPT", "E2E", "ITL p99", "pauses a request")
    _print_table("Over cached: mean (p95)", headings, rows)
    if plot is not None:
        from loraplex.bench.policy_plots import plot_policies

        plot_policies(found, plot, title=f"{bench.parameters['workload']}, every adapter cold")
        typer.echo(f"drew {plot}")
    return {policy: figures.as_json() for policy, figures in found.items()}


def _overhead(figures: PolicyFigures, metric: str) -> str:
    over = figures.overheads[metric]
    return f"{over['mean']:+.1%} ({over['p95']:+.1%})"


def _mean_p95(distribution: Distribution | None) -> str:
    return "-" if distribution is None else f"{distribution.mean:.2f} ({distribution.p95:.2f})"


def _rounded(distribution: Distribution) -> dict[str, float]:
    from dataclasses import asdict

    return {key: round(value, 3) for key, value in asdict(distribution).items()}


def _print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    typer.echo(f"\n{title}")
    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(highlight=False).print(table)
