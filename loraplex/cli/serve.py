"""`loraplex serve` and `loraplex demo`.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loraplex.cli import serve_options as option
from loraplex.cli.batching_options import BatchingPolicy, MaxDelay, parse_delay
from loraplex.cli.closed_pipe import outlive_the_reader
from loraplex.cli.configured import ConfigPath
from loraplex.cli.durations import Duration
from loraplex.cli.early_stop import exit_0_on_signal
from loraplex.cli.flags import takes_options_of
from loraplex.cli.tenant_options import MaxBorrowing, parse_borrowing
from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.logs import LogFormat, LogLevel, logging_to_stderr
from loraplex.server.addresses import parse_allowed_host, parse_allowed_origin
from loraplex.server.chat_options import ChatOptions, ReasoningParser, ToolCallParser

if TYPE_CHECKING:
    from loraplex.server.options import ServeOptions

_PROGRAM: Final = "loraplex"
_DEMO_EXAMPLES: Final = ("pirate", "haiku")


def serve_options(
    model_argument: option.ModelArgument = None,
    model: option.Model = None,
    adapters: option.AdapterDirs = None,
    adapter: option.Adapters = None,
    host: option.Host = "127.0.0.1",
    port: option.Port = 8000,
    device: option.Device = "auto",
    dtype: option.Dtype = "auto",
    kv_memory: option.KvMemory = None,
    memory_fraction: option.MemoryFraction = None,
    host_adapter_memory: option.HostAdapterMemory = None,
    kv_swap_memory: option.KvSwapMemory = None,
    max_model_len: option.MaxModelLen = None,
    tensor_parallel: option.TensorParallel = 1,
    cold_start: option.StartPolicy = ColdStart.AUTO,
    cpu_workers: option.CpuWorkers = None,
    load_popular: option.LoadPopular = False,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    max_borrowing: MaxBorrowing = None,
    threads: option.Threads = None,
    served_model_name: option.ServedModelName = None,
    tool_call_parser: option.ToolParser = ToolCallParser.AUTO,
    reasoning_parser: option.ThinkParser = ReasoningParser.AUTO,
    trust_request_chat_template: option.TrustTemplates = False,
    allow_adapter_dir: option.AllowedDirs = None,
    allow_adapter_repo: option.AllowedRepos = None,
    state_dir: option.StateDir = None,
    max_waiting: option.MaxWaiting = 4096,
    max_waiting_tokens: option.MaxWaitingTokens = 4_194_304,
    max_ttft: option.MaxTtft = None,
    max_connections: option.MaxConnections = 8192,
    shutdown_grace: option.ShutdownGrace = Duration(5),
    no_shadow_twin: option.NoShadowTwin = False,
    shadow_twin_every: option.ShadowTwinEvery = Duration(30),
    otlp_endpoint: option.OtlpEndpoint = None,
    api_key: option.ApiKeys = None,
    admin_key: option.AdminKeys = None,
    tenants: option.TenantsPath = None,
    allowed_hosts: option.AllowedHosts = None,
    allowed_origins: option.AllowedOrigins = None,
) -> ServeOptions:
    """Return the options of a server. The parameters are the CLI options that all serving commands share."""
    chosen = option.one_model(model_argument, model)
    kv_memory_bytes = option.parse_size_or_none(kv_memory, "--kv-memory")
    adapter_bytes = option.parse_size_or_none(host_adapter_memory, "--host-adapter-memory")
    kv_swap_bytes = option.parse_size_or_none(kv_swap_memory, "--kv-swap-memory")
    api_keys = option.parse_keys(api_key, "--api-key")
    admin_keys = option.parse_keys(admin_key, "--admin-key")
    option.refuse_key_beside_tenants(api_keys, tenants)
    hosts = option.parse_list(allowed_hosts, parse_allowed_host, "--allowed-hosts")
    origins = option.parse_list(allowed_origins, parse_allowed_origin, "--allowed-origins")
    adapter_sources = option.parse_adapters(adapter)
    max_delay = parse_delay(max_delay_by_grouping, batching)
    option.refuse_max_ttft_with(batching, max_ttft)
    borrowing = parse_borrowing(max_borrowing)
    option.refuse_tenants_with(batching, tenants, borrowing)

    from loraplex.adapters.remote import locate_adapter
    from loraplex.engine.options import EngineOptions
    from loraplex.server.adapter_choice import GivenAdapter
    from loraplex.server.connections import ConnectionLimits
    from loraplex.server.options import ServeOptions
    from loraplex.server.waiting import WaitingLimits

    engine = EngineOptions(
        model=chosen,
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
        batching=batching,
        max_delay=max_delay,
        max_borrowing=borrowing,
        kv_swap_memory_bytes=kv_swap_bytes,
    )
    return ServeOptions(
        engine=engine,
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
        tenants=tenants,
        allowed_hosts=hosts,
        allowed_origins=origins,
        waiting=WaitingLimits(
            max_requests=max_waiting,
            max_tokens=max_waiting_tokens,
            max_ttft_s=None if max_ttft is None else float(max_ttft),
            max_borrowing=borrowing,
        ),
        connections=ConnectionLimits(max_connections=max_connections),
        chat=ChatOptions(
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            trusts_templates=trust_request_chat_template,
        ),
        shutdown_grace_s=float(shutdown_grace),
        shadow_twin_s=None if no_shadow_twin else float(shadow_twin_every),
        otlp_endpoint=None if otlp_endpoint is None else option.parse_otlp_endpoint(otlp_endpoint),
    )


@exit_0_on_signal()
@takes_options_of(serve_options)
def serve(
    log_level: option.Level = LogLevel.INFO,
    log_format: option.Format = LogFormat.TEXT,
    config: ConfigPath = None,
    **options: Any,
) -> None:
    """Serve a base model and its LoRA adapters over an OpenAI-compatible API."""
    run_server(serve_options(**options), log_level, log_format)


def run_server(options: ServeOptions, log_level: LogLevel, log_format: LogFormat) -> None:
    """Serve until a signal arrives."""
    from loraplex.server.run import serve as run

    outlive_the_reader()
    with logging_to_stderr(log_level.number, log_format):
        run(options)


def demo(
    port: option.Port = 8000,
    replicas: option.DemoReplicas = 1,
    threads: option.Threads = None,
    allow_adapter_dir: option.AllowedDirs = None,
    allow_adapter_repo: option.AllowedRepos = None,
    log_level: option.Level = LogLevel.INFO,
    log_format: option.Format = LogFormat.TEXT,
    config: ConfigPath = None,
) -> None:
    """Serve a small base model with the adapters that come with loraplex, on this machine only."""
    from loraplex.demo import DEMO_ADAPTERS_DIR, demo_adapters
    from loraplex.demo.base import ensure_demo_base
    from loraplex.engine.options import EngineOptions
    from loraplex.server.banner import Announcer
    from loraplex.server.listening import AddressError
    from loraplex.server.options import ServeOptions
    from loraplex.server.run import serve as run
    from loraplex.server.state_dir import demo_state_dir

    outlive_the_reader()
    folder = ensure_demo_base()
    # The first ones are shown as examples: those whose effect is easy to see.
    shown = sorted(demo_adapters(), key=lambda adapter: adapter.name not in _DEMO_EXAMPLES)
    prompts = {adapter.name: adapter.example_prompt for adapter in shown}
    with logging_to_stderr(log_level.number, log_format):
        options = ServeOptions(
            engine=EngineOptions(model=str(folder), num_threads=threads),
            adapter_dirs=(DEMO_ADAPTERS_DIR,),
            allow_adapter_dirs=tuple(allow_adapter_dir or ()),
            allow_adapter_repos=tuple(allow_adapter_repo or ()),
            port=port,
            num_replicas=replicas,
            state_dir=demo_state_dir(),
        )
        try:
            run(options, Announcer(prompts))
        except AddressError as error:
            # `make demo` takes no options, so name the command that does.
            fix = f"run `{_command()} demo --port 0` for any free port, or name one"
            raise AddressError(error.reason, fix=fix) from None


def _command() -> str:
    """Return this program's name for a shell."""
    program = sys.argv[0]
    return shlex.quote(program) if Path(program).name == _PROGRAM else _PROGRAM
