"""HTTP calls to a running server from the command line."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from loraplex.core.errors import UserError
from loraplex.core.words import no_server

if TYPE_CHECKING:
    import msgspec

    S = TypeVar("S", bound=msgspec.Struct)

DEFAULT_URL: Final = "http://127.0.0.1:8000"
_TIMEOUT_S: Final = 10.0
_CHANGE_S: Final = 3600.0
"""Timeout of a change in seconds: an adapter may have to be downloaded, or wait on a busy server."""

BaseUrl = Annotated[
    str, typer.Option("--base-url", "--url", envvar="LORAPLEX_URL", help="URL of the server.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="LORAPLEX_API_KEY",
        help="API key, sent as a bearer token; to change anything, an admin key if the server has one.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def rows_of(base_url: str, path: str, api_key: str | None, *, kind: str) -> list[dict[str, Any]]:
    """Return the rows of `list_of` alone."""
    rows, _ = list_of(base_url, path, api_key, kind=kind)
    return rows


def list_of(
    base_url: str,
    path: str,
    api_key: str | None,
    *,
    kind: str,
    body: object = None,
    method: str | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the list that a route answers with, and the whole answer. `kind` names the list's items in
    errors. `method`: by default POST for a body, and GET without one.

    Raises UserError if the server cannot be reached or refuses.
    """
    url, answered = _call(base_url, path, api_key, kind=kind, body=body, method=method, timeout_s=timeout_s)
    try:
        answer = json.loads(answered)
    except ValueError:
        raise UserError(f"{url} did not answer with JSON; is it a loraplex server?") from None
    rows = answer.get("data") if isinstance(answer, dict) else answer
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{url} answered with something else than a list of {kind}")
    return rows, answer if isinstance(answer, dict) else {}


def struct_of(
    answer_type: type[S],
    base_url: str,
    path: str,
    api_key: str | None,
    *,
    kind: str,
    body: object = None,
    method: str | None = None,
) -> S:
    """Return the whole answer of a route that answers with a list. Raises like `list_of`, and for an answer
    of another version of loraplex."""
    import msgspec

    _, answer = list_of(base_url, path, api_key, kind=kind, body=body, method=method)
    try:
        return msgspec.convert(answer, answer_type)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{base_url} did not answer as a server of this version of loraplex does ({error}); call it with "
            "the version that serves there"
        ) from None


def text_of(base_url: str, path: str, api_key: str | None, *, kind: str, body: object) -> str:
    """Return the text that a change is answered with when it is done. Raises like `list_of`."""
    _, answered = _call(base_url, path, api_key, kind=kind, body=body, method=None, timeout_s=_CHANGE_S)
    return answered.decode("utf-8", "replace")


def _call(
    base_url: str,
    path: str,
    api_key: str | None,
    *,
    kind: str,
    body: object,
    method: str | None,
    timeout_s: float,
) -> tuple[str, bytes]:
    """Return the URL that was called, and the response body."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}{path}"
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter("must start with http:// or https://", param_hint="--base-url")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise typer.BadParameter(
            "has characters that no key has, such as a line break; give the key alone", param_hint="--api-key"
        )
    try:
        urllib.parse.urlsplit(url)
    except ValueError as error:
        raise typer.BadParameter(f"is no URL ({error})", param_hint="--base-url") from None
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"}
        | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answered: bytes = response.read()
    except urllib.error.HTTPError as error:
        with error:
            raise UserError(_explain_status(error.code, url, error.read(), kind)) from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(no_server(base_url, getattr(error, "reason", error))) from None
    return url, answered


def _explain_status(status: int, url: str, body: bytes, kind: str) -> str:
    match status:
        case 400:
            return _error_message(body)
        case 401:
            return f"{url} wants an API key (status {status}); give it with --api-key"
        case 403:
            return f"{url} refuses this (status {status}): {_error_message(body)}"
        case 404 if _error_field(body, "code") == "adapter_not_found":
            return _error_message(body)
        case 404:
            return f"{url} does not exist there; is it a loraplex server with {kind}?"
        case _ if _error_field(body, "message") is not None:
            return f"{url} answered with status {status}: {_error_message(body)}"
        case _:
            return f"{url} answered with status {status}; see the server's log"


def _error_message(body: bytes) -> str:
    return str(_error_field(body, "message") or "it does not say why")


def _error_field(body: bytes, name: str) -> object:
    """Return a field of an OpenAI-style error; None if the body is something else."""
    try:
        return json.loads(body)["error"][name]
    except (ValueError, KeyError, TypeError):
        return None
