"""A tiny OpenAI-compatible server on loopback, in a thread of its own, that misbehaves on demand.

What a request gets is chosen by its model's name: see `_answer`.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    base_url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    max_open: int = 0
    num_open: int = 0
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [
            *({"id": name, "object": "model", "parent": "the-base"} for name in ("lora-a", "a", "b", "c")),
            {"id": "refuse", "object": "model", "parent": "the-base"},
            {"id": "the-base", "object": "model"},
        ]
    )

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._answer(request, body)
        finally:
            self.num_open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        model = body["model"]
        if model == "refuse":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if model == "crash":
            return web.Response(text="<html>gateway</html>", status=502)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if model == "hang":
            await asyncio.Event().wait()
        num_tokens = body["max_tokens"] - (1 if model == "short" else 0)
        for index in range(num_tokens):
            if index == 2 and model == "die":
                assert request.transport is not None
                request.transport.abort()
                return response
            if index == 2 and model == "cut":
                return response
            if index == 2 and model == "error":
                await response.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
                await response.write(b"data: [DONE]\n\n")
                return response
            await response.write(_event({"choices": [{"index": 0, "text": f" t{index}"}]}))
            await asyncio.sleep(0)  # let the other requests interleave
        if model != "no-usage":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": num_tokens}
            await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"id": "cmpl-1", "object": "text_completion", **chunk}).encode() + b"\n\n"


@contextmanager
def serving() -> Iterator[FakeServer]:
    """The server, listening. In a thread: the command line under test runs an event loop of its own."""
    fake = FakeServer()
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", fake.list_models)
        app.router.add_get("/health", fake.list_models)
        app.router.add_post("/v1/completions", fake.complete)
        # A handler that hangs must not outlive the test that wanted it.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fake.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert ready.wait(timeout=30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=30)
        loop.close()
