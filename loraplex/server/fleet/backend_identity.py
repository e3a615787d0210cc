"""Identify the server at an address, and check that a fleet can use it: refusals say what to change there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from loraplex.adapters.base_name import base_names, comparable_name
from loraplex.server.decoders import decode_json
from loraplex.server.fleet.backend_errors import error_detail
from loraplex.server.fleet.backend_http import (
    Answer,
    BackendAddress,
    BackendAwayError,
    BackendError,
    BackendHttp,
    UnreachableError,
)
from loraplex.server.fleet.completion_body import BackendKind

_PROBE_NAME: Final = "lpx-probe"
# Absolute: vLLM takes a relative path that does not exist for a repository of the hub.
_PROBE_PATH: Final = "/nonexistent/loraplex-probe"
_LOAD_PATH: Final = "/v1/load_lora_adapter"
_UNLOAD_PATH: Final = "/v1/unload_lora_adapter"


@dataclass(frozen=True, kw_only=True)
class ExpectedBase:
    """The base model that all replicas must serve: its name for messages, and all names it may have."""

    shown: str
    names: frozenset[str]

    @classmethod
    def of(cls, model: str, *served_as: str) -> ExpectedBase:
        return cls(shown=model, names=base_names(model, *served_as))


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A server's description of itself. `adapters` maps the names it serves to their folders, if shown."""

    kind: BackendKind
    version: str
    base_model: str
    max_model_len: int
    adapters: Mapping[str, str | None]


class BackendFullError(BackendError):
    """The server has too many requests to accept another one."""


class _Model(msgspec.Struct, frozen=True):
    id: str
    owned_by: str = ""
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_Model]


async def look_at(address: BackendAddress, expected: ExpectedBase, *, timeout_s: float) -> None:
    """Raise BackendError unless a fleet could use the server at an address; no connection is kept."""
    http = BackendHttp(address)
    try:
        backend = await identify(http, expected, timeout_s=timeout_s)
        await check_usable(http, backend, timeout_s=timeout_s)
    finally:
        await http.close()


async def identify(http: BackendHttp, expected: ExpectedBase, *, timeout_s: float) -> Backend:
    """Identify the server. Raises BackendError unless it is vLLM or loraplex with the expected base model."""
    try:
        answer = await http.call("GET", "/v1/models", timeout_s=timeout_s, admin=True)
    except UnreachableError as error:
        raise BackendAwayError(f"{error}; start the server, or correct the address") from error
    models = _models(answer, http)
    base = next((model for model in models if model.parent is None), None)
    if base is None:
        raise BackendError(f"the server at {http.url} lists no base model; start it with one")
    if base.owned_by not in tuple(BackendKind):
        raise BackendError(
            f"the server at {http.url} is neither vLLM nor loraplex (its models are owned by "
            f"{base.owned_by!r}), so adapters cannot be loaded there; give the address of one of these"
        )
    called = {comparable_name(name) for name in (base.id, base.root) if name}
    if not called & expected.names:
        raise BackendError(
            f"the server at {http.url} serves the base model {base.id!r}, not {expected.shown!r}; start it "
            "with that model, or with --served-model-name if it is the same model by another name"
        )
    if base.max_model_len is None:
        raise BackendError(f"the server at {http.url} does not tell its max_model_len; use a newer one")
    return Backend(
        kind=BackendKind(base.owned_by),
        version=await _version(http, timeout_s),
        base_model=base.id,
        max_model_len=base.max_model_len,
        adapters={model.id: model.root for model in models if model.parent is not None},
    )


async def check_usable(http: BackendHttp, backend: Backend, *, timeout_s: float) -> None:
    """Raise BackendError unless adapters can be loaded there and answers have token ids.

    This leaves nothing behind: it requests changes that cannot be made, and one token.
    """
    try:
        # An adapter with an empty name can never exist.
        answer = await http.call("POST", _UNLOAD_PATH, {"lora_name": ""}, timeout_s=timeout_s, admin=True)
        _check_changes_allowed(answer, http, backend)
        if backend.kind is BackendKind.VLLM:
            load = {"lora_name": _PROBE_NAME, "lora_path": _PROBE_PATH}
            answer = await http.call("POST", _LOAD_PATH, load, timeout_s=timeout_s, admin=True)
            _check_lora_enabled(answer, http)
    except UnreachableError as error:
        raise BackendAwayError(f"{error}; see its log, and start it again") from error
    await check_completes(http, backend, timeout_s=timeout_s)


async def check_completes(http: BackendHttp, backend: Backend, *, timeout_s: float) -> None:
    """Raise BackendError unless the server completes a prompt with a token and returns its id;
    BackendFullError if it has no room for one."""
    body = {
        "model": backend.base_model,
        "prompt": [0],
        "max_tokens": 1,
        "temperature": 0,
        "return_token_ids": True,
    }
    try:
        answer = await http.call("POST", "/v1/completions", body, timeout_s=timeout_s)
    except UnreachableError as error:
        raise BackendAwayError(f"{error}; see its log, and start it again") from error
    _check_token_ids(answer, http)


def refused_key(answer: Answer, http: BackendHttp) -> BackendError:
    if http.has_key:
        return BackendError(
            f"the server at {http.url} refuses the API key (HTTP {answer.status}); give the one that it was "
            "started with as --backend-key, and start all backends with the same one"
        )
    return BackendError(
        f"the server at {http.url} asks for an API key (HTTP {answer.status}); give the one that it was "
        "started with as --backend-key"
    )


def _models(answer: Answer, http: BackendHttp) -> list[_Model]:
    if answer.status in (401, 403):
        raise refused_key(answer, http)
    if answer.status == 503:
        raise BackendAwayError(
            f"the server at {http.url} is not ready ({error_detail(answer).message}); wait until it is"
        )
    if 300 <= answer.status < 400:
        target = answer.headers.get("Location", "another address")
        raise BackendError(f"the server at {http.url} redirects to {target}; give the address behind it")
    reason = f"GET /v1/models: HTTP {answer.status}"
    if answer.status == 200:
        try:
            return decode_json(answer.body, _ModelList).data
        except msgspec.DecodeError:
            reason = "GET /v1/models: not a list of models"
    raise BackendError(
        f"what answers at {http.url} is no OpenAI server ({reason}); give the address of a vLLM or loraplex "
        "server, such as http://HOST:8000"
    )


async def _version(http: BackendHttp, timeout_s: float) -> str:
    """Return the server's version for the log, "" if it is unknown."""
    try:
        found = (await http.call("GET", "/version", timeout_s=timeout_s)).json()
    except UnreachableError:
        return ""
    return str(found.get("version", "")) if isinstance(found, dict) else ""


def _check_changes_allowed(answer: Answer, http: BackendHttp, backend: Backend) -> None:
    if answer.status in (401, 403):
        message = error_detail(answer).message
        raise BackendError(
            f"the server at {http.url} does not let the fleet change adapters ({message}); give its admin "
            "key as --backend-admin-key"
        )
    if backend.kind is BackendKind.VLLM and answer.status == 404:
        raise BackendError(
            f"the vLLM server at {http.url} does not load adapters while it runs; start it with "
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        )


def _check_lora_enabled(answer: Answer, http: BackendHttp) -> None:
    if answer.status < 500:
        return  # it says that there is no such folder
    message = error_detail(answer).message
    if "not enabled" in message:
        raise BackendError(
            f"the vLLM server at {http.url} runs without LoRA; start it with --enable-lora (and --max-loras, "
            "--max-lora-rank as the adapters need)"
        )
    raise BackendError(
        f"the vLLM server at {http.url} cannot load adapters (HTTP {answer.status}: {message}); see its log"
    )


def _check_token_ids(answer: Answer, http: BackendHttp) -> None:
    if answer.status in (401, 403):
        raise refused_key(answer, http)
    if answer.status != 200:
        raise (BackendFullError if answer.status == 429 else BackendError)(
            f"the server at {http.url} does not complete a prompt of one token (HTTP {answer.status}: "
            f"{error_detail(answer).message}); see its log"
        )
    found = answer.json()
    choices = found.get("choices") if isinstance(found, dict) else None
    if not (isinstance(choices, list) and choices and isinstance(choices[0].get("token_ids"), list)):
        raise BackendError(
            f"the server at {http.url} does not answer in token ids (return_token_ids); use vLLM 0.10.2 or "
            "newer, or a loraplex of this version"
        )
