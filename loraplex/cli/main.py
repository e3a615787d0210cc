"""The `loraplex` command."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Final

import typer

import loraplex
from loraplex.cli import adapter, bench, config, fleet, plan, profile, tenant, twin, workload
from loraplex.cli.closed_pipe import drop_output, end_with_the_reader
from loraplex.cli.configured import from_environment
from loraplex.cli.flags import App
from loraplex.cli.serve import demo, serve
from loraplex.core.errors import EngineFailedError, LoraplexError
from loraplex.core.exits import EXIT_ENGINE_FAILED

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app = App(
    help="Many LoRA adapters on one base LLM, at little more than the price of the base model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=from_environment("serve"))(serve)
app.command(context_settings=from_environment("demo"))(demo)
# The command groups defer their imports until a command runs, so adding them costs little.
app.add_typer(adapter.app, name="adapter")
app.add_typer(bench.app, name="bench")
app.add_typer(workload.app, name="workload")
app.add_typer(profile.app, name="profile")
app.add_typer(twin.app, name="twin")
app.add_typer(fleet.app, name="fleet")
app.add_typer(plan.app, name="plan")
app.add_typer(tenant.app, name="tenant")
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(loraplex.__version__)
        raise typer.Exit


def main() -> None:
    """Run a command. An error is one line on stderr and an exit code.

    2: bad usage. 3: the engine of a server died too often, and the server should be started again.
    130: Ctrl-C, except for servers, which end with 0. 1: everything else.
    """
    end_with_the_reader()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()  # an error at interpreter exit would print a traceback
    except LoraplexError as error:
        message = " ".join(str(error).split())
        _say(f"error: {message}")
        sys.exit(EXIT_ENGINE_FAILED if isinstance(error, EngineFailedError) else 1)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        drop_output(sys.stdout.fileno())
        where = f" to {error.filename}" if error.filename else ""
        _say(f"error: the output cannot be written{where} ({error.strerror}); make room, or write elsewhere")
        sys.exit(1)


def _say(message: str) -> None:
    typer.secho(message, fg=typer.colors.RED, err=True)


if __name__ == "__main__":
    main()
