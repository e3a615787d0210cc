"""`loraplex tenant add`, `rotate` and `list`: the file with a server's tenants.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.flags import App
from loraplex.cli.server_calls import AsJson
from loraplex.cli.table import number_column, print_table, text_column

if TYPE_CHECKING:
    from loraplex.server.tenants.tenants_file import Tenant

app = App(help="Add and list the tenants of a server, and change their keys.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Its name: letters, digits, '_' and '-'.", show_default=False)]
File = Annotated[
    Path,
    typer.Option(
        "--tenants",
        metavar="FILE",
        envvar="LORAPLEX_TENANTS",
        help="The tenants file, as given to the server.",
        show_default=False,
    ),
]
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_PERIOD: Final = re.compile(r"(\d{1,4})([smhd])")
_COLUMNS: Final = (
    text_column("tenant"),
    text_column("keys"),
    text_column("adapters"),
    number_column("requests_per_minute"),
    number_column("tokens_per_minute"),
    number_column("max_in_flight"),
    text_column("share"),
    number_column("priority"),
    text_column("rights"),
)


@app.command()
def add(
    name: Name,
    tenants: File,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Adapters that it may use, such as 'acme-*'; may be repeated."),
    ] = None,
    no_base_model: Annotated[
        bool, typer.Option("--no-base-model", help="It may not use the base model itself.")
    ] = False,
    administer: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Adapters that it may load and unload; may be repeated."),
    ] = None,
    load_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Folder, or repositories as owner/*, that it may load them from; may be repeated. The "
            "server must have opened it as well.",
        ),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, metavar="NUMBER")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Prompt and generated tokens.")
    ] = None,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Choices (prompts × n) at a time.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Of the service under load; 1 by default.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Lower ones are served first; 0 by default.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may see and change everything, as an admin key may.")
    ] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read all of /metrics.")] = False,
) -> None:
    """Add a tenant, and print its key. Only a hash of the key is stored: it is not shown again."""
    from loraplex.server.tenants.tenants_edit import add_tenant

    given: dict[str, Any] = {
        "adapters": adapter or [],
        "base_model": False if no_base_model else None,
        "administers": administer,
        "load_from": load_from,
        "operator": operator or None,
        "metrics": metrics or None,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_in_flight": max_in_flight,
        "share": share,
        "priority": priority,
    }
    key = add_tenant(tenants, name, {option: value for option, value in given.items() if value is not None})
    _show_key(key, f"the key of {name}, added to {tenants}")
    if not (adapter or administer or operator or metrics):
        _say("it may use the base model alone; --adapter PATTERN lets a tenant use adapters")


@app.command()
def rotate(
    name: Name,
    tenants: File,
    grace: Annotated[
        str,
        typer.Option(metavar="PERIOD", help="How long the earlier key stays valid: 30m, 24h, 7d."),
    ] = "0s",
) -> None:
    """Give a tenant another key, and print it."""
    from loraplex.server.tenants.tenants_edit import rotate_key

    period = _period(grace)
    key = rotate_key(tenants, name, period)
    rest = f"is valid for {grace} more" if period else "is not valid any more"
    _show_key(key, f"the key of {name}; the earlier one {rest}")


@app.command("list")
def list_tenants(tenants: File, as_json: AsJson = False) -> None:
    """List the tenants of a file, with their rights and limits."""
    from loraplex.server.tenants.tenants_file import parse_tenants, read_text

    file = parse_tenants(read_text(tenants), tenants)
    rows = [_row(tenant) for tenant in file.tenants.values()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        print_table(rows, _COLUMNS)
    else:
        _say(f"{tenants} has no tenants; add one with: loraplex tenant add NAME --tenants {tenants}")


def _row(tenant: Tenant) -> dict[str, Any]:
    now = datetime.now(UTC)
    valid = [key for key in tenant.keys if key.is_valid(now)]
    until = min((key.until for key in valid if key.until is not None), default=None)
    rights = {
        "base model": tenant.uses_base or tenant.is_operator,
        "operator": tenant.is_operator,
        "metrics": tenant.reads_metrics and not tenant.is_operator,
        f"administers {' '.join(tenant.administers.texts)}": bool(tenant.administers),
    }
    return {
        "tenant": tenant.name,
        "keys": f"{len(valid)}" + (f", one until {until:%Y-%m-%d %H:%M} UTC" if until else ""),
        "adapters": " ".join(tenant.adapters.texts),
        "requests_per_minute": tenant.limits.requests_per_minute,
        "tokens_per_minute": tenant.limits.tokens_per_minute,
        "max_in_flight": tenant.limits.max_in_flight,
        "share": f"{tenant.policy.share:g}",
        "priority": tenant.policy.priority,
        "rights": ", ".join(right for right, is_given in rights.items() if is_given),
    }


def _period(text: str) -> timedelta:
    found = _PERIOD.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no period; write it like 30m, 24h or 7d", param_hint="--grace")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _show_key(key: str, what: str) -> None:
    """Print the key alone on stdout, for scripts."""
    _say(f"{what}; keep it now, it is not shown again:")
    typer.echo(key)


def _say(message: str) -> None:
    typer.echo(message, err=True)
