"""The options of `loraplex serve`, and the parsing of their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from loraplex.adapters.names import validate_adapter_name
from loraplex.cli.durations import Duration, duration_option
from loraplex.cli.sizes import parse_size
from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import InvalidRequestError, OptionError, UserError
from loraplex.core.logs import LogFormat, LogLevel
from loraplex.server.chat_options import ReasoningParser, ToolCallParser
from loraplex.server.trace_setup import parse_endpoint


def _replicas_up_to(most: int) -> Callable[[int | None], int | None]:
    def check(number: int | None) -> int | None:
        if number is not None and not 1 <= number <= most:
            raise typer.BadParameter(f"there can be 1 to {most} replicas, not {number:,}")
        return number

    return check


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The base model: a checkpoint folder or a Hugging Face id."),
]
Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option.")]
AdapterDirs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder whose subfolders are LoRA adapters, to serve all that can be; may be repeated.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=SOURCE",
        help="One adapter; the start fails if it cannot be served. Its folder, or a Hugging Face repository "
        "(owner/name or owner/name@revision), or s3://bucket/prefix; may be repeated.",
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        callback=_replicas_up_to(64),
        help="Engine processes, each with GPUs or cores of its own; 2 by default.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="[ADDRESS]",
        help="Let Ray place the engine processes: on the cluster with its head at HOST:PORT, or on one that "
        "is started on this machine. Needs the extra `ray`.",
    ),
]
BackendUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="URL",
        help="A server that runs already, vLLM or loraplex, instead of engine processes; may be repeated.",
    ),
]
BackendKey = Annotated[
    str | None,
    typer.Option(envvar="LORAPLEX_BACKEND_KEY", help="The API key of the backends."),
]
BackendAdminKey = Annotated[
    str | None,
    typer.Option(
        envvar="LORAPLEX_BACKEND_ADMIN_KEY", help="Their key for loading adapters, if it is another one."
    ),
]
BackendMaxAdapters = Annotated[
    int | None,
    typer.Option(min=1, help="Adapters that a backend computes with at a time: vLLM's --max-loras."),
]
DemoReplicas = Annotated[
    int, typer.Option(callback=_replicas_up_to(8), help="Engine processes behind the one address.")
]
Routing = Annotated[
    str,
    typer.Option(help="How replicas share requests: auto, most-idle, rank-aware, affinity, round-robin, ..."),
]
Placement = Annotated[
    str | None,
    typer.Option(
        help="Which replicas serve an adapter: auto, everywhere, random, ...; default: everywhere, with the "
        "routing auto its own."
    ),
]
Period = Annotated[
    Duration, duration_option("--period", least=1.0, text="The time after which adapters are placed again.")
]
Migrate = Annotated[
    bool, typer.Option("--migrate", help="Requests may leave an overloaded replica for another one.")
]
ToolParser = Annotated[
    ToolCallParser,
    typer.Option(
        "--tool-call-parser",
        metavar="FORMAT",
        help="How the model writes calls of tools: hermes (Qwen too), llama3_json, mistral; none refuses "
        "tools; auto: as its chat template has them.",
    ),
]
TrustTemplates = Annotated[
    bool,
    typer.Option(
        "--trust-request-chat-template",
        help="Let requests bring chat templates, which are rendered in a process of their own.",
    ),
]
ThinkParser = Annotated[
    ReasoningParser,
    typer.Option(
        "--reasoning-parser",
        metavar="FORMAT",
        help="Whether <think> blocks are told from answers: qwen3, deepseek_r1, none; auto: if the chat "
        "template knows them.",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")]
Device = Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
KvMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="On a CPU: memory for the KV cache, e.g. 2GiB; by default a quarter of what is free, at most "
        "4 GiB.",
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(min=0.01, max=1.0, help="On a GPU: how much of its memory to use, for all; 0.9 by default."),
]
HostAdapterMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory for adapter weights, e.g. 512MiB; by default a quarter of what is free, at most "
        "8 GiB on a CPU, 64 GiB with a GPU.",
    ),
]
KvSwapMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="On a GPU: pinned host memory for the keys and values of preempted requests and for the prefix "
        "cache, e.g. 16GiB, of each replica; none by default.",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Context length in tokens; the model's by default.")
]
TensorParallel = Annotated[
    int,
    typer.Option(min=1, help="Processes that share the model; memory is what each of them may take."),
]
StartPolicy = Annotated[
    ColdStart,
    # Metavars are short: wide ones truncate the names of options on narrow terminals.
    typer.Option(
        metavar="POLICY",
        help="What a request does whose adapter is not on the device yet: "
        f"{', '.join(ColdStart)} (see docs/cold-start.md).",
    ),
]
CpuWorkers = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="For --cold-start cpu-assist and auto: processes that compute LoRA of adapters on their way, a "
        "core each. Default: one for every second core, at most 16; with a measured profile, the fewest that "
        "are within 5% as fast, and with auto only where it says that they pay.",
    ),
]
LoadPopular = Annotated[
    bool,
    typer.Option(
        "--load-popular",
        help="Bring adapters that are often asked for into spare memory before their next request.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="On a CPU: threads to compute with. By default all cores, or fewer while other programs hold "
        "them up.",
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="What clients call the base model; by default the name of its folder, or its Hugging Face id."
    ),
]
AllowedDirs = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="A folder adapters may be loaded from at run time; may be repeated."),
]
AllowedRepos = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Hugging Face repositories and S3 folders that adapters may be fetched from at run time, as in "
        "'my-org/*' or 's3://bucket/adapters/*'; may be repeated. None by default.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where adapters loaded through the API are remembered; by default $LORAPLEX_STATE, or "
        "~/.local/state/loraplex.",
    ),
]
MaxWaiting = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="REQUESTS",
        help="Requests (prompts × n) that may wait for their first token; more are refused with 429.",
    ),
]
MaxWaitingTokens = Annotated[
    int, typer.Option(min=1, metavar="TOKENS", help="Prompt tokens that may wait, likewise.")
]
MaxTtft = Annotated[
    Duration | None,
    duration_option(
        may_be_least=False,
        text="Refuse a request with 429 if its first token is predicted to take longer, e.g. 2s; no bound by "
        "default.",
    ),
]
NoShadowTwin = Annotated[
    bool,
    typer.Option(
        "--no-shadow-twin",
        help="Do not replay the last minutes on a model of the engine; /metrics shows what it predicts "
        "beside what was measured.",
    ),
]
ShadowTwinEvery = Annotated[
    Duration, duration_option(least=1.0, most=86400, text="How often they are replayed.")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send a trace of each generation request to an OpenTelemetry collector, over HTTP: "
        "http://collector:4318; by default to $OTEL_EXPORTER_OTLP_ENDPOINT, if set. Needs the extra `otel`.",
    ),
]
MaxConnections = Annotated[
    int, typer.Option(min=1, help="Connections at a time; idle ones make room for new ones.")
]
ShutdownGrace = Annotated[
    Duration,
    duration_option(
        most=86400,
        text="How long requests in flight may go on after SIGTERM or SIGINT before they are cancelled.",
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY", envvar="LORAPLEX_API_KEY", help="Clients must send one of these."),
]
AdminKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        envvar="LORAPLEX_ADMIN_KEY",
        help="Loading and unloading adapters needs one of these; without any, only clients on this "
        "machine may.",
    ),
]
TenantsPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="LORAPLEX_TENANTS",
        help="TOML file with the tenants that may use the server: their keys, adapters and limits. It is "
        "read again when it changes; `loraplex tenant` writes it.",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="DNS names that the server answers to beside localhost and --host: api.example.com, "
        "*.example.com, or * for any; may be repeated.",
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Web pages that may call the server from a browser: https://chat.example.com, or * for any; "
        "may be repeated.",
    ),
]
Level = Annotated[
    LogLevel,
    typer.Option(
        metavar="LEVEL",
        help=f"{', '.join(LogLevel)}; info has a line for each request and each change of an adapter.",
    ),
]
Format = Annotated[
    LogFormat, typer.Option(metavar="FORMAT", help="Lines of the log on stderr: text or json.")
]


def one_model(model: str | None, named: str | None) -> str:
    """Return the model, which is given as an argument or as an option. Raises a usage error otherwise."""
    if (model is None) == (named is None):
        what = "the model is missing" if model is None else f"there are two models, {model} and {named}"
        raise typer.BadParameter(f"{what}; give one: a folder or a repository", param_hint="MODEL")
    found = model or named
    assert found is not None
    return found


def parse_adapters(texts: Sequence[str] | None) -> dict[str, str]:
    """Parse each --adapter NAME=SOURCE into name -> source."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, source = text.partition("=")
        if not equals or not source:
            example = f"{name}=SOURCE" if equals else f"{text.rstrip('/').rpartition('/')[2]}={text}"
            raise typer.BadParameter(f"{text!r} is not NAME=SOURCE; write {example}", param_hint="--adapter")
        try:
            validate_adapter_name(name)
        except InvalidRequestError as error:
            raise typer.BadParameter(str(error), param_hint="--adapter") from None
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--adapter")
        found[name] = source
    return found


def parse_size_or_none(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)


def parse_keys(keys: Sequence[str] | None, option: str) -> tuple[str, ...]:
    if any(not key.strip() for key in keys or ()):
        raise typer.BadParameter("a key must not be empty", param_hint=option)
    return tuple(keys or ())


def refuse_key_beside_tenants(api_keys: Sequence[str], tenants: Path | None) -> None:
    """Refuse API keys of nobody where every key belongs to a tenant."""
    if api_keys and tenants is not None:
        raise typer.BadParameter(
            "with --tenants, every key belongs to a tenant; leave it out, or LORAPLEX_API_KEY, and make keys "
            "with `loraplex tenant add`",
            param_hint="--api-key",
        )


def refuse_tenants_with(batching: Batching, tenants: Path | None, borrowing: float | None) -> None:
    """Refuse tenants under a policy that knows no shares."""
    for option, value in (("--tenants", tenants), ("--max-borrowing", borrowing)):
        if value is not None and not batching.knows_tenants:
            raise typer.BadParameter(
                f"--batching {batching} serves adapters in turn and knows no tenants, so that shares and "
                "objectives would not hold; leave it out, or choose fcfs, grouped or auto",
                param_hint=option,
            )


def parse_list(texts: Sequence[str] | None, parse: Callable[[str], str], option: str) -> tuple[str, ...]:
    """Return the values of an option that is repeated, or given once with comma-separated values."""
    try:
        return tuple(parse(part) for text in texts or () for part in text.split(",") if part.strip())
    except UserError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def parse_otlp_endpoint(url: str) -> str:
    try:
        return parse_endpoint(url)
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint="--otlp-endpoint") from None


def refuse_max_ttft_with(batching: Batching, seconds: float | None) -> None:
    """Refuse `--max-ttft` under a policy with which first tokens cannot be predicted."""
    if seconds is not None and not batching.knows_tenants:
        raise typer.BadParameter(
            f"with --batching {batching}, first tokens cannot be predicted; leave it out, or choose fcfs, "
            "grouped or auto",
            param_hint="--max-ttft",
        )
