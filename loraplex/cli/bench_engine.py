"""`loraplex bench engine`: measure the engine itself, in-process, with random weights.

Imports of torch are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from loraplex.cli.batching_options import BatchingPolicy, MaxDelay, parse_delay
from loraplex.cli.flags import App
from loraplex.cli.fleet_show import batching_in_words
from loraplex.cli.json_out import check_writable, write_json
from loraplex.core.batching import Batching
from loraplex.core.modules import MAX_RANK
from loraplex.core.words import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loraplex.bench.distribution import Distribution
    from loraplex.engine.core import Engine
    from loraplex.workload.jsonl import WorkloadFile, WorkloadRequest

app = App(help="Measure the engine in-process, with random weights.", no_args_is_help=True)

_SERVED_ADAPTERS: Final = 200
_SERVED_RANK: Final = 64
"""Rank of every adapter if the workload has no header."""


class Adapters(StrEnum):
    """The adapters of a batch."""

    NONE = "none"
    ONE = "one"
    DISTINCT = "distinct"


Shape = Annotated[
    str,
    typer.Option(
        help="llama-2-7b, llama-3-8b, qwen2.5-7b, ... or tiny. auto: llama-2-7b on a GPU, tiny on a CPU."
    ),
]
Device = Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16, float32; auto: float32 on a CPU.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="On a CPU: threads to compute with; all cores by default.")
]
_Batch = Annotated[int, typer.Option(min=1, help="Requests at a time.")]
_Adapters = Annotated[Adapters, typer.Option(help="One for all requests, or one each.")]
Rank = Annotated[int, typer.Option(min=1, max=MAX_RANK, help="Rank of every adapter.")]
_Ranks = Annotated[str, typer.Option(help="Ranks in turn, e.g. 8,16,32,64; instead of --rank.")]
Modules = Annotated[str, typer.Option(help="Targeted linears: q,k,v or all.")]
_Padded = Annotated[
    bool, typer.Option(help="For comparison: pad every adapter to the largest rank of its batch. GPU only.")
]
Prompt = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
_Output = Annotated[int, typer.Option(min=16, help="Tokens of each answer.")]
_Repeats = Annotated[int, typer.Option(min=1, help="Measured runs, after one that is not.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write figures, machine and parameters here.")]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An engine, its adapters, and the parameters of both."""

    engine: Engine
    versions: tuple[str, ...]
    vocab_size: int
    parameters: dict[str, Any]
    build_s: float


@app.command()
def decode(
    shape: Shape = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    batch: _Batch = 32,
    adapters: _Adapters = Adapters.NONE,
    rank: Rank = 64,
    ranks: _Ranks = "",
    modules: Modules = "q,k,v",
    padded: _Padded = False,
    prompt_tokens: Prompt = 128,
    output_tokens: _Output = 256,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    repeats: _Repeats = 3,
    json_out: Json = None,
) -> None:
    """Time between tokens of a full batch."""
    from loraplex.bench.engine_scenarios import Load, measure_decode

    bench = set_up(locals(), num_adapters=_num_adapters(adapters, batch))
    load = Load(
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        adapters=bench.versions,
        vocab_size=bench.vocab_size,
    )
    describe(bench, f"batch {batch}, {prompt_tokens} prompt and {output_tokens} output tokens each")
    _publish(bench, json_out, itl_ms=measure_decode(bench.engine, load, repeats))


@app.command()
def prefill(
    shape: Shape = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    batch: _Batch = 1,
    adapters: _Adapters = Adapters.NONE,
    rank: Rank = 64,
    ranks: _Ranks = "",
    modules: Modules = "q,k,v",
    padded: _Padded = False,
    prompt_tokens: Prompt = 512,
    repeats: _Repeats = 10,
    json_out: Json = None,
) -> None:
    """Time from a batch of prompts to the last of their first tokens."""
    from loraplex.bench.engine_scenarios import Load, measure_prefill

    bench = set_up(locals(), num_adapters=_num_adapters(adapters, batch))
    load = Load(
        batch=batch,
        prompt_tokens=prompt_tokens,
        output_tokens=1,
        adapters=bench.versions,
        vocab_size=bench.vocab_size,
    )
    describe(bench, f"batch {batch}, {prompt_tokens} prompt tokens each")
    _publish(bench, json_out, prefill_ms=measure_prefill(bench.engine, load, repeats))


@app.command()
def serve(
    workload: Annotated[
        Path,
        typer.Option(
            help="The .jsonl file to replay, each request at its time. A line: "
            '{"arrival_s": 0.5, "prompt_tokens": 20, "output_tokens": 50, "adapter": 0}. Its header says how '
            "many adapters there are, and their ranks. Adapter 7 of 5 is 2."
        ),
    ],
    shape: Shape = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    num_adapters: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Registered adapters; 0: base model only. Default: as many as the workload's header has, or "
            f"{_SERVED_ADAPTERS} without a header.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_RANK,
            help="Rank of every adapter. Default: the ranks of the workload's header, or "
            f"{_SERVED_RANK} without a header.",
        ),
    ] = None,
    ranks: _Ranks = "",
    modules: Modules = "q,k,v",
    padded: _Padded = False,
    max_step_tokens: Annotated[int, typer.Option(min=16, help="Prompt tokens in one step.")] = 2048,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    warm_up: Annotated[bool, typer.Option(help="Capture graphs and compile kernels before.")] = True,
    json_out: Json = None,
) -> None:
    """Replay a workload in real time; latency and throughput. Adapters start in host memory."""
    from rich.console import Console

    from loraplex.bench.engine_scenarios import replay
    from loraplex.bench.random_engine import BLOCK_SIZE
    from loraplex.bench.report import render, summarize
    from loraplex.workload.jsonl import WorkloadFile

    file = WorkloadFile(workload)
    requests = list(file)
    served = _served_adapters(file, num_adapters, rank, ranks)
    bench = set_up(locals() | {"rank": served.rank, "ranks": served.ranks}, num_adapters=served.number)
    check_lengths(requests, workload, bench.engine.max_model_len)
    bench.parameters.update(
        workload=workload.name,
        kv_tokens=bench.engine.stats().num_kv_blocks * BLOCK_SIZE,
        position_cost=bench.engine.step_work.position_cost,
    )
    describe(bench, f"{len(requests)} {plural('request', len(requests))}")
    started = time.perf_counter()
    if warm_up:
        bench.engine.warm_up()
        typer.echo(f"warm-up took {time.perf_counter() - started:.1f} s")
    else:
        bench.engine.get_ready()
    report = summarize(replay(bench.engine, requests, bench.versions, bench.vocab_size))
    Console().print(
        render(report, title=f"{workload.name}, {served.number} {plural('adapter', served.number)}")
    )
    write(bench, json_out, report.as_json() | _show_batching(bench))


class _Served(NamedTuple):
    """The adapters that serve a workload. `ranks`: in turn, comma-separated; empty: all have `rank`."""

    number: int
    rank: int
    ranks: str


def _served_adapters(file: WorkloadFile, num_adapters: int | None, rank: int | None, ranks: str) -> _Served:
    """Return the workload's own adapters, as in the twin, unless an option says otherwise."""
    header = file.header
    if num_adapters is None:
        num_adapters = _SERVED_ADAPTERS if header is None else header.num_adapters
    if rank is None and not ranks.strip() and header is not None:
        if max(header.ranks) > MAX_RANK:
            raise typer.BadParameter(
                f"{file.path.name} has adapters of rank {max(header.ranks)}, and ranks go up to {MAX_RANK}; "
                "give --rank or --ranks",
                param_hint="--workload",
            )
        if len(set(header.ranks)) == 1:
            rank = header.ranks[0]
        else:
            ranks = ",".join(map(str, header.ranks))
    return _Served(number=num_adapters, rank=_SERVED_RANK if rank is None else rank, ranks=ranks)


def _num_adapters(adapters: Adapters, batch: int) -> int:
    return {Adapters.NONE: 0, Adapters.ONE: 1, Adapters.DISTINCT: batch}[adapters]


def set_up(options: dict[str, Any], num_adapters: int) -> Bench:
    """Build the engine and register the adapters, from a command's own arguments."""
    import torch

    from loraplex.bench.random_engine import (
        RandomEngineOptions,
        build_random_engine,
        random_specs,
        register,
    )
    from loraplex.engine.build import DTYPES
    from loraplex.kernels.lora import padded_rank
    from loraplex.model.shapes import config_of_shape

    workload = options.get("workload")
    check_writable(options["json_out"], inputs=() if workload is None else (workload,))
    options = options | resolved(options)
    _check_context(options, config_of_shape(options["shape"]).shape.max_position)
    if options["dtype"] not in DTYPES:
        raise typer.BadParameter(f"choose {', '.join(DTYPES)}", param_hint="--dtype")
    use_threads(options.get("threads"), options["device"])
    batching = options.get("batching", Batching.FCFS)
    max_delay = parse_delay(options.get("max_delay_by_grouping"), batching)
    ranks = _rank_list(options["ranks"]) or [options["rank"]]
    padded = options.get("padded", False)
    if padded and options["device"] != "cuda":
        raise typer.BadParameter("adapters are padded on a GPU only", param_hint="--padded")
    started = time.perf_counter()
    engine = build_random_engine(
        RandomEngineOptions(
            shape=options["shape"],
            device=options["device"],
            dtype=DTYPES[options["dtype"]],
            max_step_tokens=options.get("max_step_tokens", 2048),
            compiled=True,
            padded_to=padded_rank(max(ranks)) if padded else None,
            from_files=options.get("from_files", False),
            cpu_workers=options.get("cpu_workers"),
            batching=batching,
            max_delay=max_delay,
        )
    )
    specs = random_specs(
        "adapter", options["shape"], num_adapters=num_adapters, ranks=ranks, modules=options["modules"]
    )
    versions = register(engine, specs)
    if options["device"] == "cuda":
        torch.cuda.synchronize()
    unused = "rank" if options["ranks"] else "ranks"
    parameters = {
        key: value for key, value in options.items() if isinstance(value, int | float | str) and key != unused
    }
    return Bench(
        engine=engine,
        versions=versions,
        vocab_size=config_of_shape(options["shape"]).shape.vocab_size,
        parameters=parameters | {"num_adapters": num_adapters},
        build_s=time.perf_counter() - started,
    )


def describe(bench: Bench, load: str) -> None:
    """Print what is measured on one line, before any figures. `load` describes the engine's load."""
    typer.echo(f"{_subject(bench.parameters)}; {_adapters(bench.parameters)}; {load}")


def _subject(parameters: Mapping[str, Any]) -> str:
    import torch

    from loraplex.engine.machine import cpu_model
    from loraplex.model.shapes import config_of_shape
    from loraplex.perf.subject import shape_key

    name, num_threads = parameters["shape"], torch.get_num_threads()
    if parameters["device"] == "cuda":
        machine = torch.cuda.get_device_name(0)
    else:
        machine = f"cpu, {num_threads} {plural('thread', num_threads)} of {cpu_model()}"
    return f"{name} ({shape_key(config_of_shape(name).shape)}), {parameters['dtype']}, on {machine}"


def _adapters(parameters: Mapping[str, Any]) -> str:
    number = parameters["num_adapters"]
    if number == 0:
        return "no adapters"
    # The adapters take the ranks in turn, so ranks beyond the number of adapters are not used.
    ranks = sorted(set(_rank_list(str(parameters.get("ranks") or parameters["rank"]))[:number]))
    of_rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]} to {ranks[-1]}"
    padded = ", padded to the largest of a batch" if parameters.get("padded") else ""
    return f"{number} {plural('adapter', number)} of {of_rank}{padded} on {parameters['modules']}"


def use_threads(num_threads: int | None, device: str) -> None:
    """Compute with this many threads, if given."""
    import torch

    from loraplex.engine.machine import check_threads

    if num_threads is None:
        return
    if device != "cpu":
        raise typer.BadParameter("threads compute on a CPU only; leave it out", param_hint="--threads")
    check_threads(num_threads)
    torch.set_num_threads(num_threads)


def resolved(options: dict[str, Any]) -> dict[str, str]:
    """Return the shape, dtype and device that `auto` means on this machine."""
    import torch

    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    defaults = {
        "shape": "llama-2-7b" if on_gpu else "tiny",
        "dtype": "bfloat16" if on_gpu else "float32",
    }
    chosen = {key: default if options[key] == "auto" else options[key] for key, default in defaults.items()}
    return chosen | {"device": device}


def _check_context(options: dict[str, Any], max_position: int) -> None:
    num_tokens = options.get("prompt_tokens", 0) + options.get("output_tokens", 1)
    if num_tokens > max_position:
        raise typer.BadParameter(
            f"{num_tokens} tokens with the answer are more than the shape's context of {max_position}",
            param_hint="--prompt-tokens",
        )


def check_lengths(requests: Sequence[WorkloadRequest], workload: Path, max_model_len: int) -> None:
    for number, request in enumerate(requests, start=1):
        if request.prompt_tokens + request.output_tokens > max_model_len:
            raise typer.BadParameter(
                f"{workload.name}, request {number}: {request.prompt_tokens} prompt and "
                f"{request.output_tokens} output tokens are more than the shape's context of {max_model_len}"
                "; make shorter ones: `loraplex workload make` with --max-prompt-tokens "
                f"{max_model_len - max_model_len // 2} --max-output-tokens {max_model_len // 2}",
                param_hint="--workload",
            )


def _rank_list(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint="--ranks") from None
    if any(not 1 <= rank <= MAX_RANK for rank in ranks):
        raise typer.BadParameter(f"ranks go from 1 to {MAX_RANK}", param_hint="--ranks")
    return ranks


def _publish(bench: Bench, json_out: Path | None, **found: Distribution | None) -> None:
    for name, distribution in found.items():
        assert distribution is not None
        figures = ", ".join(f"{key} {value:.2f}" for key, value in asdict(distribution).items())
        typer.echo(f"{name}: {figures}")
    rounded = {
        name: {key: round(value, 3) for key, value in asdict(distribution).items()}
        for name, distribution in found.items()
        if distribution is not None
    }
    write(bench, json_out, rounded | _show_batching(bench))


def _show_batching(bench: Bench) -> dict[str, int]:
    """Print what a batching policy that merges decided, and return it; nothing for the others."""
    if not Batching(bench.parameters.get("batching", Batching.FCFS)).merges:
        return {}
    stats = bench.engine.stats()
    counts = {
        "num_steps": stats.num_steps,
        "num_merges": stats.num_merges,
        "num_merged_steps": stats.num_merged_steps,
        "num_pauses": stats.num_pauses,
    }
    adapters_per_step = stats.num_step_adapters / max(stats.num_steps, 1)
    typer.echo(batching_in_words(counts | {"adapters_per_step": adapters_per_step}))
    return counts


def write(bench: Bench, json_out: Path | None, results: dict[str, Any]) -> None:
    from loraplex.bench.environment import ENGINE_PACKAGES, environment

    if json_out is None:
        return
    document = environment(ENGINE_PACKAGES) | {
        "parameters": bench.parameters,
        "build_s": round(bench.build_s, 2),
        "results": results,
    }
    write_json(json_out, document)
