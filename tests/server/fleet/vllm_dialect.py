"""A server that answers as vLLM 0.26 does, without a model: formats of bodies, statuses, streams, metrics.

Tokens are a function of the prompt and the model's name, so that tests can tell which model answered.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EOS = 2
VOCAB_SIZE = 400


@dataclass
class Behaviour:
    """The server's behaviour; tests change it while it runs."""

    base_model: str = "acme/tiny"
    root: str = "/models/tiny"
    owned_by: str = "vllm"
    api_key: str | None = None
    has_lora: bool = True
    allows_updates: bool = True
    knows_token_ids: bool = True
    max_lora_rank: int = 16
    eos_after: int | None = None
    pause_after: int | None = None
    """Number of tokens after which a stream waits for `resume`."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    cut_after: int | None = None
    """Number of tokens after which the connection is cut."""
    tells_cached: bool = False
    """True if it was started with --enable-prompt-tokens-details."""
    wrong_token: int | None = None
    """Token id sent instead of the second one, also in its log-probability."""
    fail_after: int | None = None
    """Number of tokens after which the stream has an error event."""
    failure: tuple[int, str, str] | None = None
    """Status, type and message that every completion is answered with."""
    retry_after: str | None = None
    health: int = 200
    is_deaf: bool = False
    """True if health checks are not answered at all."""
    load_gate: asyncio.Event | None = None
    num_forgotten: int = 0
    """Number of requests for adapters that find theirs just unloaded by another front."""
    keeps: set[str] = field(default_factory=set)
    """Names of adapters that it fails to unload."""
    answer_gate: asyncio.Event | None = None
    """Event that streams wait for before their answers begin."""
    probe_gate: asyncio.Event | None = None
    """Event that completions without a stream wait for."""
    hang_ups: int = 0
    """Number of streams that are cut before their answers begin."""
    drops: bool = False
    """True if every connection that asks for a completion is cut."""


def tokens_of(model: str, prompt: list[int], count: int) -> list[int]:
    start = sum(prompt) + sum(model.encode())
    return [10 + (start + 7 * index) % (VOCAB_SIZE - 20) for index in range(count)]


def error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return web.json_response(body, status=status)


class VllmDialect:
    """The server. Use it with `async with`; `stop` and `start` end it and bring it back on the same port."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.does = behaviour or Behaviour()
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.traceparents: list[str | None] = []
        self.num_cancelled = 0
        self.num_asked = 0  # for its health
        self.paused = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> VllmDialect:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Forget everything, as a server without a state folder does."""
        self.adapters.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    def bodies(self, verb: str) -> list[dict[str, Any]]:
        """Return the bodies sent to the routes whose last part is `verb`; the first completion is the
        probe's."""
        return [body for path, body in self.calls if path.endswith(verb)]

    def _refusal(self, request: web.Request) -> web.Response | None:
        key = self.does.api_key
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return None

    async def _health(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        if self.does.is_deaf:
            await asyncio.Event().wait()
        return web.Response(status=self.does.health)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.26.0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        label = f'engine="0",model_name="{self.does.base_model}"'
        return web.Response(
            text=(
                "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
                "# TYPE vllm:num_requests_running gauge\n"
                f"vllm:num_requests_running{{{label}}} 3.0\n"
                "# HELP vllm:num_requests_waiting Number of requests waiting to be processed.\n"
                "# TYPE vllm:num_requests_waiting gauge\n"
                f"vllm:num_requests_waiting{{{label}}} 2.0\n"
                f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}} 2.0\n'
                "# TYPE vllm:kv_cache_usage_perc gauge\n"
                f"vllm:kv_cache_usage_perc{{{label}}} 0.25\n"
                "# TYPE vllm:prefix_cache_queries_total counter\n"
                f"vllm:prefix_cache_queries_total{{{label}}} 120.0\n"
                "# TYPE vllm:prefix_cache_hits_total counter\n"
                f"vllm:prefix_cache_hits_total{{{label}}} 48.0\n"
                "# TYPE vllm:num_preemptions_total counter\n"
                f"vllm:num_preemptions_total{{{label}}} 1.0\n"
                "# TYPE vllm:cache_config_info gauge\n"
                'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="400",'
                'num_cpu_blocks="None"} 1.0\n'
            ),
            content_type="text/plain",
        )

    async def _models(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal

        def card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": 1,
                "owned_by": self.does.owned_by,
                "root": root,
                "parent": parent,
                "max_model_len": max_model_len,
                "permission": [],
            }

        base = self.does.base_model
        cards = [card(base, self.does.root, None, 256)]
        cards += [card(name, path, base, None) for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        if (refusal := await self._begin_change(request)) is not None:
            return refusal
        _, body = self.calls[-1]
        name, path = body["lora_name"], body["lora_path"]
        if self.does.load_gate is not None:
            await self.does.load_gate.wait()
        if not name or not path:
            return error(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters and not body.get("load_inplace"):
            return error(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        if not self.does.has_lora:
            return error(500, "InternalServerError", "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if not os.path.isdir(path):
            return error(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        with open(os.path.join(path, "adapter_config.json")) as file:
            rank = json.load(file)["r"]
        if rank > self.does.max_lora_rank:
            message = f"LoRA rank {rank} is greater than max_lora_rank {self.does.max_lora_rank}."
            return error(500, "InternalServerError", message)
        self.adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        if (refusal := await self._begin_change(request)) is not None:
            return refusal
        name = self.calls[-1][1]["lora_name"]
        if not name:
            return error(400, "InvalidUserInput", "'lora_name' needs to be provided.")
        if name in self.does.keeps:
            return error(500, "InternalServerError", "EngineCore encountered an issue.")
        if self.adapters.pop(name, None) is None:
            return error(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _begin_change(self, request: web.Request) -> web.Response | None:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if not self.does.allows_updates:
            return error(404, "Not Found", "Not Found")
        self.calls.append((request.path, await request.json()))
        return None

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.calls.append((request.path, body))
        self.traceparents.append(request.headers.get("traceparent"))
        model = body["model"]
        if self.does.probe_gate is not None and not body.get("stream"):
            await self.does.probe_gate.wait()
        if self.does.drops:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.does.failure is not None:
            response = error(*self.does.failure)
            if self.does.retry_after is not None:
                response.headers["Retry-After"] = self.does.retry_after
            return response
        if self.does.num_forgotten and self.adapters.pop(model, None) is not None:
            self.does.num_forgotten -= 1
        if model != self.does.base_model and model not in self.adapters:
            return error(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        if not body.get("stream"):
            [token] = tokens_of(model, body["prompt"], 1)
            choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}
            if self.does.knows_token_ids:
                choice["token_ids"] = [token]
            return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.does.answer_gate is not None:
            await self.does.answer_gate.wait()
        if self.does.hang_ups:
            self.does.hang_ups -= 1
            assert request.transport is not None
            request.transport.abort()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        tokens = tokens_of(body["model"], body["prompt"], body["max_tokens"])
        reason, does = "length", self.does
        if does.eos_after is not None and does.eos_after < len(tokens):
            tokens, reason = [*tokens[: does.eos_after], EOS], "stop"
        try:
            for index, token in enumerate(tokens):
                if does.pause_after == index:
                    self.paused.set()
                    await does.resume.wait()
                if does.cut_after == index:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                if does.fail_after == index:
                    problem = {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}
                    await _send(response, {"error": problem | {"param": None, "code": 500}})
                    await response.write(b"data: [DONE]\n\n")
                    return response
                if does.wrong_token is not None and index == 1:
                    token = does.wrong_token
                finish = reason if index == len(tokens) - 1 else None
                await _send(response, _chunk(body, index, token, finish))
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens), "total_tokens": 0}
        details = {"prompt_tokens_details": {"cached_tokens": 1}} if does.tells_cached else {}
        await _send(response, {"id": "cmpl-1", "choices": [], "usage": usage | details})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(body: dict[str, Any], index: int, token: int, finish: str | None) -> dict[str, Any]:
    echoed = body["prompt"] if body.get("echo") and index == 0 else []
    choice = {
        "index": 0,
        "text": "a",
        "logprobs": None if body.get("logprobs") is None else _logprobs(echoed, token, body["logprobs"]),
        "finish_reason": finish,
        "stop_reason": None,
        "prompt_token_ids": body["prompt"] if index == 0 else None,
        "token_ids": [token],
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice]}


def _logprobs(echoed: list[int], token: int, num_top: int) -> dict[str, Any]:
    """The answer's token comes first, then the likeliest; here it is not one of them."""
    tokens = [*echoed, token]
    names = [f"token_id:{each}" for each in tokens]
    tops = [
        {name: -9999.0}
        | {f"token_id:{(each + 1 + rank) % VOCAB_SIZE}": -0.5 - rank for rank in range(num_top)}
        for each, name in zip(tokens, names, strict=True)
    ]
    nothing = bool(echoed)
    return {
        "text_offset": [0] * len(tokens),
        "tokens": names,
        "token_logprobs": [None if nothing and place == 0 else -9999.0 for place in range(len(tokens))],
        "top_logprobs": [None if nothing and place == 0 else top for place, top in enumerate(tops)],
    }
