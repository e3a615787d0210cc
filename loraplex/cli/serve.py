"""`loraplex serve` and `loraplex demo`.

Imports wait until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from loraplex.adapters.names import validate_adapter_name
from loraplex.cli.sizes import parse_size
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import InvalidRequestError, UserError
from loraplex.core.logs import LogFormat, LogLevel, logging_to_stderr
from loraplex.server.addresses import parse_allowed_host, parse_allowed_origin

_DEMO_EXAMPLES: Final = ("pirate", "haiku")
_Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=SOURCE",
        help="One adapter: its folder, or a Hugging Face repository (owner/name or owner/name@revision); "
        "may be repeated.",
    ),
]
_AllowedDirs = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="A folder adapters may be loaded from at run time; may be repeated."),
]
_AllowedRepos = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Hugging Face repositories that adapters may be fetched from at run time, as in 'my-org/*'; "
        "may be repeated. None by default.",
    ),
]
_AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="DNS names that the server answers to beside localhost and --host: api.example.com, "
        "*.example.com, or * for any; may be repeated.",
    ),
]
_AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Web pages that may call the server from a browser: https://chat.example.com, or * for any; "
        "may be repeated.",
    ),
]
_Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="NUMBER",
        help="On a CPU: threads to compute with. By default all cores, or fewer while other programs hold "
        "them up.",
    ),
]
_LogLevel = Annotated[
    LogLevel,
    typer.Option(
        metavar="LEVEL",
        help=f"{', '.join(LogLevel)}; info has a line for each request and each change of an adapter.",
    ),
]
_LogFormat = Annotated[
    LogFormat, typer.Option(metavar="FORMAT", help="Lines of the log on stderr: text or json.")
]


def serve(
    model: Annotated[str, typer.Option(help="The base model: a checkpoint folder or a Hugging Face id.")],
    adapters: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A folder whose subfolders are LoRA adapters; may be repeated."),
    ] = None,
    adapter: _Adapters = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")] = 8000,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="On a CPU: memory for the KV cache, e.g. 2GiB.")
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="On a GPU: how much of its memory to use, for all; 0.9 by default."
        ),
    ] = None,
    host_adapter_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory for adapter weights, e.g. 512MiB.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context length in tokens; the model's by default.")
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Processes that share the model; memory is what each of them may take."),
    ] = 1,
    cold_start: Annotated[
        ColdStart,
        # Kinds of values are kept short here: wide ones cut the names of options on narrow terminals.
        typer.Option(
            metavar="POLICY",
            help="What a request does whose adapter is not on the device yet: "
            f"{', '.join(ColdStart)} (see docs/cold-start.md).",
        ),
    ] = ColdStart.AUTO,
    cpu_workers: Annotated[
        int | None,
        typer.Option(
            min=0, help="For --cold-start cpu-assist: processes, a core each; half of them by default."
        ),
    ] = None,
    load_popular: Annotated[
        bool,
        typer.Option(
            "--load-popular",
            help="Bring adapters that are often asked for into spare memory before their next request.",
        ),
    ] = False,
    threads: _Threads = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the base model; --model as given by default.")
    ] = None,
    allow_adapter_dir: _AllowedDirs = None,
    allow_adapter_repo: _AllowedRepos = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where loaded adapters are remembered.")] = None,
    max_waiting: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="REQUESTS",
            help="Requests (prompts × n) that may wait for their first token; more are refused with 429.",
        ),
    ] = 4096,
    max_waiting_tokens: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Prompt tokens that may wait, likewise.")
    ] = 4_194_304,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections at a time; idle ones make room for new ones.")
    ] = 8192,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", envvar="LORAPLEX_API_KEY", help="Clients must send one of these."),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="LORAPLEX_ADMIN_KEY",
            help="Loading and unloading adapters needs one of these; without any, only clients on this "
            "machine may.",
        ),
    ] = None,
    allowed_hosts: _AllowedHosts = None,
    allowed_origins: _AllowedOrigins = None,
    log_level: _LogLevel = LogLevel.INFO,
    log_format: _LogFormat = LogFormat.TEXT,
) -> None:
    """Serve a base model and its LoRA adapters over an OpenAI-compatible API."""
    kv_memory_bytes = None if kv_memory is None else parse_size(kv_memory, "--kv-memory")
    adapter_bytes = (
        None if host_adapter_memory is None else parse_size(host_adapter_memory, "--host-adapter-memory")
    )
    api_keys = _checked_keys(api_key or (), "--api-key")
    admin_keys = _checked_keys(admin_key or (), "--admin-key")
    hosts = _parse_list(allowed_hosts or (), parse_allowed_host, "--allowed-hosts")
    origins = _parse_list(allowed_origins or (), parse_allowed_origin, "--allowed-origins")
    adapter_sources = _parse_adapters(adapter or ())

    from loraplex.adapters.hub import locate_adapter
    from loraplex.engine.options import EngineOptions
    from loraplex.server.adapter_startup import GivenAdapter
    from loraplex.server.connections import ConnectionLimits
    from loraplex.server.run import ServeOptions
    from loraplex.server.run import serve as run_server
    from loraplex.server.waiting import WaitingLimits

    options = ServeOptions(
        engine=EngineOptions(
            model=model,
            device=device,
            dtype=dtype,
            kv_memory_bytes=kv_memory_bytes,
            memory_fraction=memory_fraction,
            host_adapter_memory_bytes=adapter_bytes,
            max_model_len=max_model_len,
            num_threads=threads,
            tensor_parallel=tensor_parallel,
            cold_start=cold_start,
            cpu_workers=cpu_workers,
            loads_popular=load_popular,
        ),
        served_model_name=served_model_name,
        adapters=tuple(
            GivenAdapter(name=name, source=locate_adapter(source)) for name, source in adapter_sources.items()
        ),
        adapter_dirs=tuple(adapters or ()),
        allow_adapter_dirs=tuple(allow_adapter_dir or ()),
        allow_adapter_repos=tuple(allow_adapter_repo or ()),
        host=host,
        port=port,
        state_dir=state_dir,
        api_keys=api_keys,
        admin_keys=admin_keys,
        allowed_hosts=hosts,
        allowed_origins=origins,
        waiting=WaitingLimits(max_requests=max_waiting, max_tokens=max_waiting_tokens),
        connections=ConnectionLimits(max_connections=max_connections),
    )
    with logging_to_stderr(log_level.number, log_format):
        run_server(options)


def demo(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")] = 8000,
    threads: _Threads = None,
    log_level: _LogLevel = LogLevel.INFO,
    log_format: _LogFormat = LogFormat.TEXT,
) -> None:
    """Serve a small base model with the adapters that come with loraplex, on this machine only."""
    from loraplex.demo import DEMO_ADAPTERS_DIR, demo_adapters
    from loraplex.demo.base import ensure_demo_base
    from loraplex.engine.options import EngineOptions
    from loraplex.server.banner import Announcer
    from loraplex.server.run import ServeOptions
    from loraplex.server.run import serve as run_server

    folder = ensure_demo_base()
    # The first ones are shown as examples: those whose effect is seen at a glance.
    shown = sorted(demo_adapters(), key=lambda adapter: adapter.name not in _DEMO_EXAMPLES)
    prompts = {adapter.name: adapter.example_prompt for adapter in shown}
    # A state of its own, gone at the end: what was loaded by hand into one demo is not part of the next.
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-demo-", ignore_cleanup_errors=True) as state_dir,
        logging_to_stderr(log_level.number, log_format),
    ):
        options = ServeOptions(
            engine=EngineOptions(model=str(folder), num_threads=threads),
            served_model_name=folder.name,
            adapter_dirs=(DEMO_ADAPTERS_DIR,),
            port=port,
            state_dir=Path(state_dir),
        )
        run_server(options, Announcer(prompts))


def _parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """NAME=SOURCE of each --adapter, as name to source."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or not source:
            raise typer.BadParameter(f"{text!r} is not NAME=SOURCE", param_hint="--adapter")
        try:
            validate_adapter_name(name)
        except InvalidRequestError as error:
            raise typer.BadParameter(str(error), param_hint="--adapter") from None
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice", param_hint="--adapter")
        found[name] = source
    return found


def _checked_keys(keys: Sequence[str], option: str) -> tuple[str, ...]:
    if any(not key.strip() for key in keys):
        raise typer.BadParameter("a key must not be empty", param_hint=option)
    return tuple(keys)


def _parse_list(texts: Sequence[str], parse: Callable[[str], str], option: str) -> tuple[str, ...]:
    """The values of an option that is repeated, or given once with commas between its values."""
    try:
        return tuple(parse(part) for text in texts for part in text.split(",") if part.strip())
    except UserError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
