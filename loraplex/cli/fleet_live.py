"""`loraplex fleet serve` and `loraplex fleet status`: replicas that serve.

Imports wait until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loraplex.cli import serve_options as option
from loraplex.cli.early_stop import exit_0_on_signal
from loraplex.cli.flags import takes_options_of
from loraplex.cli.serve import run_server, serve_options
from loraplex.core.logs import LogFormat, LogLevel


@exit_0_on_signal()
@takes_options_of(serve_options)
def serve(
    replicas: option.Replicas = 2,
    routing: option.Routing = "auto",
    log_level: option.Level = LogLevel.INFO,
    log_format: option.Format = LogFormat.TEXT,
    **options: Any,
) -> None:
    """Serve a base model and its LoRA adapters by several engine processes behind one address."""
    from loraplex.fleet.routers.named import router_named

    router_named(routing)  # a name that does not exist should not cost a start to find out
    asked = replace(serve_options(**options), num_replicas=replicas, routing=routing)
    run_server(asked, log_level, log_format)
