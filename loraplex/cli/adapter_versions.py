"""`loraplex adapter load`, `unload`, `promote`, `abort`, `rollback`, `versions`: the versions of names."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer

from loraplex.cli.server_calls import DEFAULT_URL, ApiKey, AsJson, BaseUrl, rows_of, text_of
from loraplex.cli.table import Column, print_table, text_column
from loraplex.core.errors import UserError
from loraplex.core.words import unknown_name

_COLUMNS: Final = (
    text_column("name"),
    text_column("role"),
    text_column("version", lambda version: version[:12]),
    Column(key="share", heading="share", kind=float, show="{:.4g}".format),
    text_column("path"),
)

_OPTIONS: Final = {
    "set load_inplace": "give --replace",
    "load_inplace": "--replace",
    "canary_share": "--canary-share",
    "GET /v1/adapters lists": "`loraplex adapter list` shows",
}
"""Terms in the API's messages, and what they are called on the command line."""

Name = Annotated[str, typer.Argument(help="The adapter's name on the server.")]


def load(
    name: Name,
    source: Annotated[
        str,
        typer.Argument(
            help="A folder as the server sees it, or a Hugging Face repository: owner/name or "
            "owner/name@revision."
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Move a name that is served to this version.")
    ] = False,
    canary_share: Annotated[
        float | None,
        typer.Option(
            help="Keep the version that is served, and have this one answer so much of the name's requests: "
            "0.1 for a tenth. Once more with the same folder changes the share."
        ),
    ] = None,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter into a running server, or another version of it."""
    share = {} if canary_share is None else {"canary_share": canary_share}
    body = {"lora_name": name, "lora_path": source, "load_inplace": replace, **share}
    _change("load", body, base_url, api_key)


def unload(name: Name, base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Stop serving an adapter, after its requests in flight."""
    _change("unload", {"lora_name": name}, base_url, api_key)


def promote(name: Name, base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Have an adapter's canary answer all of its requests."""
    _change("promote", {"lora_name": name}, base_url, api_key)


def abort(name: Name, base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """End the trial of an adapter's canary."""
    _change("abort", {"lora_name": name}, base_url, api_key)


def rollback(
    name: Name,
    version: Annotated[
        str | None, typer.Option(help="The beginning of an earlier version, as `adapter versions` shows it.")
    ] = None,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Let an adapter be the version that it was before, if its files are still the same."""
    given = {} if version is None else {"version": version}
    _change("rollback", {"lora_name": name, **given}, base_url, api_key)


def versions(
    name: Annotated[str | None, typer.Argument(help="One adapter's name; all adapters by default.")] = None,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the versions of a server's adapters: the one that is served, its canary, and those before."""
    adapters = rows_of(base_url, "/v1/adapters", api_key, kind="adapters")
    if name is not None:
        named = [adapter for adapter in adapters if adapter.get("name") == name]
        if not named:
            known = (str(adapter.get("name")) for adapter in adapters)
            raise UserError(f"{base_url}: {unknown_name('adapter', name, known)}")
        adapters = named
    rows = [row for adapter in adapters for row in _rows(adapter)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif not rows:
        typer.echo("no adapters")
    else:
        print_table(rows, _COLUMNS)


def _rows(adapter: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the versions in order of use. Only administrators see paths."""
    canary = adapter.get("canary")
    canary_share = 0.0 if canary is None else float(canary["share"])
    found = [
        {**adapter, "role": "stable", "share": 1.0 - canary_share},
        *([] if canary is None else [{**canary, "role": "canary"}]),
        *({**each, "role": "previous"} for each in adapter.get("previous", ())),
    ]
    keys = ("role", "version", "share", "path")
    return [{"name": adapter["name"], **{key: each.get(key) for key in keys}} for each in found]


def _change(verb: str, body: dict[str, Any], base_url: str, api_key: str | None) -> None:
    path = f"/v1/{verb}_lora_adapter"
    try:
        answer = text_of(base_url, path, api_key, kind="adapters that can be changed", body=body)
    except UserError as error:
        raise UserError(_in_options(str(error))) from None
    typer.echo(answer)


def _in_options(message: str) -> str:
    """Replace the API's terms in a server's message by those of the command line."""
    for field, option in _OPTIONS.items():
        message = message.replace(field, option)
    return message
