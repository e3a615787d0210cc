"""`loraplex bench`: measure a running OpenAI-compatible server.

Imports of the load client are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli import bench_cold, bench_engine, bench_kernels
from loraplex.cli.flags import App
from loraplex.cli.json_out import check_picture, check_writable, write_json
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.bench.records import RequestRecord
    from loraplex.workload.jsonl import WorkloadRequest

app = App(help="Measure a running server, the engine itself, or its GPU kernels.", no_args_is_help=True)
bench_engine.app.command()(bench_cold.cold)
app.add_typer(bench_engine.app, name="engine")
app.command()(bench_kernels.kernels)

EXIT_FAILED_REQUESTS = 1
_WARMUP_SEED_OFFSET = 1_000_003  # warm-up prompts must not leave a prefix cache hit behind


_Workload = Annotated[
    Path | None,
    typer.Option(
        help="Open loop: replay this .jsonl file, each request at its own time. A line: "
        '{"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 50, "adapter": 0}.'
    ),
]
_Requests = Annotated[
    int | None, typer.Option(min=1, help="Closed loop: this many requests, all of one length.")
]
_Concurrency = Annotated[int | None, typer.Option(min=1, help="Closed loop: requests in flight at any time.")]
_Adapters = Annotated[
    str,
    typer.Option(
        help="Comma-separated adapter names: in turn (closed loop), or by the workload's index "
        "modulo their number. Without it, all requests go to the base model."
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The options of one run, checked."""

    base_url: str
    api_key: str | None
    model: str | None
    adapters: tuple[str, ...]
    workload: list[WorkloadRequest] | None
    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int
    seed: int
    num_warmup: int
    timeout_s: float


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8000")],
    workload: _Workload = None,
    requests: _Requests = None,
    concurrency: _Concurrency = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Closed loop: tokens of each prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Closed loop: tokens of each answer.")] = 32,
    adapters: _Adapters = "",
    model: Annotated[
        str | None, typer.Option(help="The base model's id. Default: the first one in /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAPLEX_API_KEY", help="Sent as a bearer token.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=11, help="Prompts are random token ids from 10 up to this.")
    ] = 4096,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal prompts.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, and not counted.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Give up on a request after this.")] = 600.0,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the figures, machine and parameters here.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the latency CDFs into this PNG.")] = None,
) -> None:
    """Send completions to a server and report latency and throughput.

    Give either --workload, or --requests with --concurrency. Exit code 1: some requests failed (they
    are counted and their errors shown); 2: bad usage.
    """
    _check_url(base_url)
    _check_loop(workload, requests, concurrency)
    inputs = () if workload is None else (workload,)
    check_writable(json_out, inputs=inputs)
    check_picture(plot, inputs=inputs)
    plan = _Plan(
        base_url=base_url,
        api_key=api_key,
        model=model,
        adapters=_names(adapters),
        workload=None if workload is None else _read(workload),
        num_requests=requests or 0,
        concurrency=concurrency or 0,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        vocab_size=vocab_size,
        seed=seed,
        num_warmup=warmup,
        timeout_s=timeout_s,
    )
    records = _measure(plan)
    _publish(records, _parameters(plan, workload), json_out=json_out, plot=plot)
    if any(not record.ok for record in records):
        raise typer.Exit(EXIT_FAILED_REQUESTS)


def _check_url(base_url: str) -> None:
    if not base_url.startswith(("http://", "https://")):
        raise typer.BadParameter("must start with http:// or https://", param_hint="--base-url")


def _names(adapters: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in adapters.split(",")) if adapters.strip() else ()
    if "" in names:
        raise typer.BadParameter("an adapter name is empty", param_hint="--adapters")
    return names


def _check_loop(workload: Path | None, requests: int | None, concurrency: int | None) -> None:
    if workload is not None and (requests is not None or concurrency is not None):
        raise typer.BadParameter(
            "the file says how many requests and when; drop --requests and --concurrency"
        )
    if workload is None and (requests is None or concurrency is None):
        raise typer.BadParameter("give --workload FILE, or --requests N with --concurrency C")


def _read(path: Path) -> list[WorkloadRequest]:
    from loraplex.workload.jsonl import WorkloadError, read_workload

    try:
        return read_workload(path)
    except WorkloadError as error:
        raise typer.BadParameter(str(error), param_hint="--workload") from error


def _measure(plan: _Plan) -> list[RequestRecord]:
    from rich.console import Console

    from loraplex.bench.client import BenchError
    from loraplex.bench.load import run

    try:
        return run(_run_plan(plan))
    except BenchError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED_REQUESTS) from error


async def _run_plan(plan: _Plan) -> list[RequestRecord]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from loraplex.bench.client import BenchError, CompletionClient
    from loraplex.bench.load import closed_loop, open_loop
    from loraplex.bench.prompts import PromptSource, uniform_requests, workload_requests

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with CompletionClient(plan.base_url, api_key=plan.api_key, timeout_s=plan.timeout_s) as client:
        if plan.adapters:
            await client.check_adapters(plan.adapters)
        models = plan.adapters or (plan.model or await client.base_model(),)
        source = PromptSource(seed=plan.seed, vocab_high=plan.vocab_size)
        warmup = uniform_requests(
            PromptSource(seed=plan.seed + _WARMUP_SEED_OFFSET, vocab_high=plan.vocab_size),
            num_requests=plan.num_warmup,
            prompt_tokens=plan.prompt_tokens,
            output_tokens=plan.output_tokens,
            models=models,
        )
        # Drawing the bar takes CPU time from a server on the same machine: twice a second is enough.
        with Progress(*columns, refresh_per_second=2, transient=True) as progress:
            if warmup:
                task = progress.add_task("warm-up", total=len(warmup))
                warmed = await closed_loop(
                    client,
                    warmup,
                    concurrency=plan.concurrency or len(warmup),
                    on_done=lambda _: progress.advance(task),
                )
                if failed := [record.error for record in warmed if not record.ok]:
                    raise BenchError(
                        f"{len(failed)} warm-up {plural('request', len(failed))} failed: {failed[0]}"
                    )
            if plan.workload is not None:
                todo = workload_requests(source, workload=plan.workload, models=models)
                task = progress.add_task("replay", total=len(todo))
                return await open_loop(
                    client,
                    todo,
                    arrivals_s=[request.arrival_s for request in plan.workload],
                    on_done=lambda _: progress.advance(task),
                )
            todo = uniform_requests(
                source,
                num_requests=plan.num_requests,
                prompt_tokens=plan.prompt_tokens,
                output_tokens=plan.output_tokens,
                models=models,
            )
            task = progress.add_task("requests", total=len(todo))
            return await closed_loop(
                client, todo, concurrency=plan.concurrency, on_done=lambda _: progress.advance(task)
            )


def _parameters(plan: _Plan, workload: Path | None) -> dict[str, Any]:
    """Describe the run for the JSON. File names only: results are published, folders are private."""
    shape: dict[str, Any] = (
        {"loop": "open", "workload": workload.name, "requests": len(plan.workload or ())}
        if workload is not None
        else {
            "loop": "closed",
            "requests": plan.num_requests,
            "concurrency": plan.concurrency,
            "prompt_tokens": plan.prompt_tokens,
            "output_tokens": plan.output_tokens,
        }
    )
    return shape | {
        "model": plan.model,
        "adapters": list(plan.adapters),
        "seed": plan.seed,
        "vocab_size": plan.vocab_size,
        "warmup": plan.num_warmup,
    }


def _publish(
    records: list[RequestRecord],
    parameters: dict[str, Any],
    *,
    json_out: Path | None,
    plot: Path | None,
) -> None:
    from rich.console import Console

    from loraplex.bench.environment import environment
    from loraplex.bench.report import latencies, render, summarize

    report = summarize(records)
    num_adapters = len(parameters["adapters"])
    who = f"{num_adapters} {plural('adapter', num_adapters)}" if num_adapters else "base model"
    loop = parameters.get("workload") or f"closed loop of {parameters['concurrency']}"
    title = f"{report.num_requests} {plural('request', report.num_requests)}, {loop}, {who}"
    console = Console()
    console.print(render(report, title=title))
    if json_out is not None:
        result = environment() | {"parameters": parameters, "result": report.as_json()}
        write_json(json_out, result)
    if plot is not None:
        from loraplex.bench.plots import plot_cdfs

        plot_cdfs(latencies(records), plot, title=title)
        console.print(f"wrote {plot}", highlight=False, markup=False)
