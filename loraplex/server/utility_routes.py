"""Routes for tokenizing, health, version and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

import loraplex
from loraplex.core.errors import InvalidRequestError
from loraplex.engine.tool_traits import ToolTraits
from loraplex.server.chat_messages import template_messages
from loraplex.server.continuing import Continued
from loraplex.server.deps import ServerDeps
from loraplex.server.disconnect import run_until_disconnect
from loraplex.server.health import LIVE_PATH, READY_PATHS, live_response, ready_response
from loraplex.server.metrics_export import CONTENT_TYPE, MetricsSnapshot, render_metrics
from loraplex.server.model_routes import json_response
from loraplex.server.openapi import operation
from loraplex.server.requests import DetokenizeRequest, TokenizeRequest
from loraplex.server.responses import Health, Text, Tokens, Version
from loraplex.server.tenants.access import access_of
from loraplex.server.tenants.tenant_metrics import render_tenants
from loraplex.server.tool_calls.call_ids import with_accepted_ids
from loraplex.server.tool_calls.tool_use import tool_use
from loraplex.server.waiting import Refused


def utility_router(deps: ServerDeps) -> APIRouter:
    router = APIRouter()
    _add_tokenizing(router, deps)
    _add_monitoring(router, deps)
    return router


def _add_tokenizing(router: APIRouter, deps: ServerDeps) -> None:
    prompts = deps.text.prompts

    @router.post(
        "/tokenize",
        **operation(
            summary="Tokens of a text or a conversation",
            body=TokenizeRequest,
            answer=Tokens,
            errors=(401, 404, 429),
        ),
    )
    async def tokenize(request: Request) -> Response:
        async with deps.bodies.read(request, TokenizeRequest) as body:
            _check_model(deps, request, body.model)
            tokens = await run_until_disconnect(_tokenize(deps, body), request.receive, deps.pacer)
        answer = Tokens(tokens=tokens, count=len(tokens), max_model_len=deps.text.max_model_len)
        return json_response(answer)

    @router.post(
        "/detokenize",
        **operation(summary="Text of tokens", body=DetokenizeRequest, answer=Text, errors=(401, 404, 429)),
    )
    async def detokenize(request: Request) -> Response:
        async with deps.bodies.read(request, DetokenizeRequest) as body:
            _check_model(deps, request, body.model)
            decoding = prompts.detokenize(body.tokens, vocab_size=deps.text.vocab_size)
            text = await run_until_disconnect(decoding, request.receive, deps.pacer)
        return json_response(Text(prompt=text))


async def _tokenize(deps: ServerDeps, body: TokenizeRequest) -> list[int]:
    prompts = deps.text.prompts
    if body.messages is not None and body.prompt is None:
        tokenizer = deps.text.tokenizer
        tools = tool_use(
            body.tools,
            None,
            is_parallel=True,
            template=tokenizer.template_text,
            traits=await prompts.tool_traits() if body.tools else ToolTraits(),
            options=deps.chat,
        )
        tool_format = deps.chat.tool_format(tokenizer.template_text)
        return await prompts.tokenize_chat(
            with_accepted_ids(template_messages(body.messages), tool_format),
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
            template_options=body.chat_template_kwargs,
            tools=() if tools is None else tools.for_template,
        )
    if body.prompt is not None and body.messages is None:
        return await prompts.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    raise InvalidRequestError("give either prompt or messages", param="prompt")


def _add_monitoring(router: APIRouter, deps: ServerDeps) -> None:
    async def ready() -> Response:
        return ready_response(
            deps.engine_status(),
            _why_no_adapters(deps),
            is_ready_without=deps.is_ready_without_adapters,
            note=_note(deps),
        )

    for path in READY_PATHS:
        summary = "Are requests served?"
        router.get(path, **operation(summary=summary, answer=Health, errors=(503,)))(ready)

    @router.get(LIVE_PATH, **operation(summary="Is the server there?", answer=Health))
    async def live() -> Response:
        return live_response()

    @router.get("/version", **operation(summary="Version of the server", answer=Version, errors=(401,)))
    async def version() -> Response:
        return json_response(Version(version=loraplex.__version__))

    @router.get(
        "/metrics", **operation(summary="Prometheus metrics", answer_text="text/plain", errors=(401, 503))
    )
    async def metrics(request: Request) -> Response:
        access = access_of(request.scope)
        if not access.reads_metrics:
            return _page(render_tenants(deps.tenants, deps.waiting, only=access.tenant))
        snapshot = MetricsSnapshot(
            base_model=deps.adapters.base_model,
            stats=await deps.text.engine.stats(),
            metrics=deps.metrics.snapshot(),
            num_restarts=deps.engine_status().num_restarts,
            num_refused={reason.value: deps.waiting.num_refused[reason] for reason in Refused},
            num_continued={reason.value: deps.continued[reason] for reason in Continued},
            adapters=deps.adapters.served(),
            num_left_out=len(deps.adapters.left_out),
            replicas=() if deps.fleet is None else deps.fleet.replicas,
            holders=None if deps.fleet is None else deps.fleet.holders,
            batching=deps.batching,
            num_plans=0 if deps.fleet is None else deps.fleet.num_plans,
            twin=None if deps.shadow_twin is None else deps.shadow_twin.figures,
        )
        of_tenants = render_tenants(deps.tenants, deps.waiting)
        # In a thread: streams continue while a page of thousands of adapters is rendered.
        page = await asyncio.to_thread(render_metrics, snapshot)
        return _page(page + of_tenants)


def _page(text: bytes) -> Response:
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _note(deps: ServerDeps) -> str | None:
    """Return what the answer about health should say although the server is ready; it is for everybody."""
    if deps.tenants is not None and deps.tenants.trouble is not None:
        return (
            "the tenants file cannot be used as it is now, so what it said before is in force; the server's "
            "log and GET /v1/tenants say why"
        )
    return None


def _why_no_adapters(deps: ServerDeps) -> str | None:
    """Return why the engine refuses all adapters; None if any is served. A few refused adapters do not affect
    the others."""
    refused = {name: left for name, left in deps.adapters.left_out.items() if left.is_refused}
    if not refused or deps.adapters.served():
        return None
    if deps.tenants is not None:  # names and reasons are not for everybody
        return f"none of {len(refused):,} adapters is served; the server's log says why"
    name, left = next(iter(refused.items()))
    return f"none of {len(refused):,} adapters is served; {name!r}: {left.reason}"


def _check_model(deps: ServerDeps, request: Request, model: str | None) -> None:
    """Raise UnknownModelError if the model does not exist, although all models share one tokenizer. A
    tenant's request counts against its limit on requests; raises QuotaError beyond that."""
    access = access_of(request.scope)
    if model is not None:
        deps.adapters.find(model, access)
    if access.account is not None:
        access.account.admit(0).close()
