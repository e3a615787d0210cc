"""`loraplex fleet serve`, `status`, `drain`, `restart`, `scale` and `explain`: live fleets.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli import serve_options as option
from loraplex.cli.applied_plan import plan_lines
from loraplex.cli.backend_options import refuse_engine_options
from loraplex.cli.configured import ConfigPath
from loraplex.cli.durations import Duration
from loraplex.cli.early_stop import exit_0_on_signal
from loraplex.cli.flags import WITHOUT_VALUE, takes_options_of
from loraplex.cli.serve import run_server, serve_options
from loraplex.cli.server_calls import DEFAULT_URL, ApiKey, AsJson, BaseUrl, list_of
from loraplex.cli.table import number_column, print_table, text_column
from loraplex.core.errors import UserError
from loraplex.core.logs import LogFormat, LogLevel
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.server.fleet.explain import Explanation

Move = Annotated[
    bool,
    typer.Option("--move", help="Do not wait for requests in flight: the other replicas go on with them."),
]
_DEFAULT_REPLICAS: Final = 2
_FLEET_PATH: Final = "/v1/fleet"
_CHANGE_S: Final = 3600.0
"""Timeout of a change in seconds: draining a replica, or starting a large model, may take long."""
_REFUSED_WITHIN_S: Final = 1.0
"""Seconds after which a change counts as accepted: a refusal comes before the change starts."""
# The most important columns first: a narrow terminal drops the last ones.
_COLUMNS: Final = (
    number_column("replica"),
    text_column("state"),
    number_column("in_flight"),
    number_column("sent"),
    number_column("placed"),
    number_column("restarts"),
    number_column("pid", show=str),
    text_column("node"),
    text_column("message"),
)


_SEEN_COLUMNS: Final = (
    number_column("replica"),
    text_column("verdict"),
    number_column("running"),
    number_column("waiting"),
    text_column("adapter"),
    number_column("placed"),
    number_column("ms_per_token"),
    number_column("step_ms"),
    number_column("queue_ms"),
    number_column("load_ms"),
    number_column("kv_tokens_left"),
)


@exit_0_on_signal()
@takes_options_of(serve_options)
def serve(
    replicas: option.Replicas = None,
    routing: option.Routing = "auto",
    placement: option.Placement = None,
    period: option.Period = Duration(60),
    migrate: option.Migrate = False,
    ray: option.Ray = None,
    backend: option.BackendUrls = None,
    backend_key: option.BackendKey = None,
    backend_admin_key: option.BackendAdminKey = None,
    backend_max_adapters: option.BackendMaxAdapters = None,
    log_level: option.Level = LogLevel.INFO,
    log_format: option.Format = LogFormat.TEXT,
    config: ConfigPath = None,
    **options: Any,
) -> None:
    """Serve a base model and its LoRA adapters by several replicas behind one address.

    Replicas are engine processes on this machine or on a Ray cluster, or servers that run already.
    """
    from loraplex.fleet.policy import Policy
    from loraplex.server.fleet.backend_replicas import Backends
    from loraplex.server.fleet.ray_cluster import RayPlace

    # Check the names before the start, which takes long.
    policy = Policy.of(routing, placement, migrates=migrate)
    if backend and replicas is not None:
        raise typer.BadParameter(
            "replicas are started here, backends run already; give one of both", param_hint="--replicas"
        )
    if backend and ray is not None:
        raise typer.BadParameter(
            "Ray places replicas that are started, backends run already; give one of both", param_hint="--ray"
        )
    if backend:
        refuse_engine_options(options, serve_options)
    if backend_max_adapters is not None and not backend:
        raise typer.BadParameter(
            "it is about servers that run already; name them with --backend, or leave it out",
            param_hint="--backend-max-adapters",
        )
    backends = Backends(
        urls=tuple(backend or ()),
        api_key=backend_key,
        admin_key=backend_admin_key,
        max_adapters=backend_max_adapters,
    )
    asked = replace(
        serve_options(**options),
        num_replicas=replicas or _DEFAULT_REPLICAS,
        policy=policy.name,
        period_s=float(period),
        backends=backends if backend else None,
        ray=None if ray is None else RayPlace(address=_ray_address(ray)),
    )
    run_server(asked, log_level, log_format)


def _ray_address(given: str) -> str | None:
    """Return the cluster's address; without one, that of RAY_ADDRESS, as in Ray's own programs, or None."""
    return (os.environ.get("RAY_ADDRESS") or None) if given == WITHOUT_VALUE else given


def status(base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show the replicas of a running fleet."""
    _show(*list_of(base_url, _FLEET_PATH, api_key, kind="replicas"), as_json=as_json)


def drain(
    replica: Annotated[int, typer.Argument(help="Its number, as `fleet status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Send it requests again.")] = False,
    move: Move = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Send a replica no more requests; it finishes those that it has."""
    if undo and move:
        raise UserError("--undo and --move do not go together; leave one of them out")
    what, body = ("undrain", {"replica": replica}) if undo else ("drain", {"replica": replica, "move": move})
    _change(what, body, base_url, api_key, as_json=as_json)


def restart(
    replica: Annotated[int, typer.Argument(help="Its number, as `fleet status` shows it.")],
    move: Move = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Replace a replica by a new one once its requests have ended; the others serve meanwhile."""
    with _said_if_slow(f"waiting for the server to restart replica {replica}"):
        _change("restart", {"replica": replica, "move": move}, base_url, api_key, as_json=as_json)


def scale(
    replicas: Annotated[int, typer.Argument(help="The new number of replicas.")],
    move: Move = False,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Set the number of replicas; those that leave finish their requests first."""
    with _said_if_slow(f"waiting for the server to scale to {replicas} {plural('replica', replicas)}"):
        _change("scale", {"replicas": replicas, "move": move}, base_url, api_key, as_json=as_json)


@contextmanager
def _said_if_slow(message: str) -> Iterator[None]:
    """Print to stderr what is being waited for if the server has not refused at once: it answers when it is
    done. It may still refuse later, or be unreachable."""
    timer = threading.Timer(_REFUSED_WITHIN_S, _say, (f"{message}; this may take a while",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _change(what: str, body: dict[str, int], base_url: str, api_key: str | None, *, as_json: bool) -> None:
    """Request a change, wait until it is done, and show the replicas."""
    rows, answer = list_of(
        base_url, f"{_FLEET_PATH}/{what}", api_key, kind="replicas", body=body, timeout_s=_CHANGE_S
    )
    _show(rows, answer, as_json=as_json)


def _show(rows: list[dict[str, Any]], answer: dict[str, Any], *, as_json: bool) -> None:
    """Show the replicas and the rest of the server's answer, as JSON or as a table."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    refusals = []
    for row in rows:
        if row.get("message") and row.get("state") == "ready":  # too long for a column
            refusals.append(f"replica {row['replica']}: {row['message']}")
            row["message"] = ""
        if row.get("drained"):
            row["state"] = "drained" if row.get("state") == "ready" else f"{row.get('state')}, drained"
    print_table(rows, _COLUMNS)
    for line in refusals:
        typer.echo(line)
    for left in answer.get("left_out", []):
        typer.echo(f"adapter {left['name']!r} is not served, and tried again: {left['reason']}")
    for line in plan_lines(answer.get("plan")):
        typer.echo(line)


def explain(
    request: Annotated[
        str | None,
        typer.Argument(
            help="Its `id` in the body of the answer, or enough of the beginning of it; default: the latest.",
            show_default=False,
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="The server's --state-dir, if it has one; those of a demo are found without."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show why a request was sent to its replica: all replicas as the router saw them."""
    import msgspec

    from loraplex.server.fleet.logged_names import names_of

    folder, found = _explained(request, state_dir)
    names = {each.decision.version: _named(folder, each.decision.version) for each in found}
    if as_json:
        rows = [
            {**msgspec.to_builtins(each.decision), "again": each.again, "policy": each.policy}
            | {"adapters": [] if each.decision.version is None else names_of(folder, each.decision.version)}
            | {"why": each.why, "costs_are_measured": each.is_measured}
            | {"replicas": [asdict(replica) for replica in each.replicas]}
            for each in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for each in found:
        decision = each.decision
        when = datetime.fromtimestamp(decision.at_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        typer.echo(
            f"{decision.request_id}: {decision.prompt_tokens:,} prompt tokens for {names[decision.version]}, "
            f"sent to replica {decision.replica} at {when} UTC by {each.policy}: {each.why}"
        )
        if each.again != decision.replica:
            typer.echo(f"replayed, it would be replica {each.again}: another version of loraplex decided it")
        print_table([asdict(replica) for replica in each.replicas], _SEEN_COLUMNS)
        typer.echo(
            "ms per token = step + (queue + load) / tokens of the usual answer; queue: the prompts before "
            "it, load: of its adapter"
        )
    guessed = [each for each in found if not each.is_measured]
    if guessed:
        why = (
            "there is no profile of servers behind --backend"
            if guessed[0].is_elsewhere
            else "nobody has measured these replicas (`loraplex profile --model MODEL` measures this machine)"
        )
        typer.echo(f"times are guessed, right in their proportions at best: {why}")


def _explained(request: str | None, state_dir: Path | None) -> tuple[Path, list[Explanation]]:
    """Return the decisions about a request, or about the latest one, and the state folder they are in: the
    given one, or else the default one or the demo's. Raises UserError if there are none."""
    from loraplex.server.fleet.decision_log import FOLDER, logged_decisions
    from loraplex.server.fleet.explain import explain as explained
    from loraplex.server.state_dir import default_state_dir, demo_state_dir

    folders = [default_state_dir(), demo_state_dir()] if state_dir is None else [state_dir]
    there = [folder for folder in folders if any((folder / FOLDER).glob("*.jsonl"))]
    decisions = ((folder, explained(request, logged_decisions(folder))) for folder in there)
    decided = ((folder, found) for folder, found in decisions if found)
    if request is None:
        latest = max(decided, key=lambda each: each[1][-1].decision.at_unix_s, default=None)
    else:
        latest = next(decided, None)  # do not read the logs of further folders
    if latest is not None:
        return latest
    looked = ", ".join(str(folder / FOLDER) for folder in there or folders)
    if not there:
        raise UserError(
            f"there are no decisions in {looked}; give the --state-dir of a server with several replicas, "
            "such as one started with `loraplex fleet serve`"
        )
    about = "any request" if request is None else repr(request)
    raise UserError(
        f"no decision about {about} is in {looked}, which holds the latest ones, by the `id` in the body "
        "of the answer; if another server has answered, give its --state-dir"
    )


def _named(folder: Path, version: str | None) -> str:
    """Return an adapter's names and version for people."""
    from loraplex.server.fleet.logged_names import names_of

    if version is None:
        return "the base model"
    names = names_of(folder, version)
    return f"{' or '.join(names) or 'an adapter without a name'} (version {version[:12]})"
