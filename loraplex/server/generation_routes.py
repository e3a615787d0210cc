"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError
from loraplex.core.sampling import SamplingParams
from loraplex.core.words import plural
from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.prompt_offsets import prompt_offsets
from loraplex.engine.text_engine import TextEngine
from loraplex.server.adapter_service import Lease
from loraplex.server.chat_format import ChatFormat
from loraplex.server.chat_messages import template_messages
from loraplex.server.completion_format import CompletionFormat, EchoedPrompt
from loraplex.server.deps import ServerDeps
from loraplex.server.generation import AnswerFormat, Generation, GenerationResponse, now_unix_s
from loraplex.server.openapi import operation
from loraplex.server.request_log import request_record
from loraplex.server.requests import ChatRequest, CompletionRequest, SamplingFields
from loraplex.server.responses import ChatCompletion, Completion
from loraplex.server.sampling import chat_params, completion_params

# Prompts × n of one request; each is a request of its own to the engine.
MAX_CHOICES_PER_REQUEST: Final = 2048
_ERRORS: Final = (401, 404, 429, 500, 503)


def generation_router(deps: ServerDeps) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        **operation(
            summary="Answer a conversation",
            body=ChatRequest,
            answer=ChatCompletion,
            streams=True,
            errors=_ERRORS,
        ),
    )
    async def chat_completions(request: Request) -> Response:
        body = await deps.bodies.read(request, ChatRequest)
        lease = _lease(deps, request, body.model)
        try:
            return await _start_chat(deps, body, lease)
        except BaseException:
            lease.release()
            raise

    @router.post(
        "/v1/completions",
        **operation(
            summary="Continue one or several prompts",
            body=CompletionRequest,
            answer=Completion,
            streams=True,
            errors=_ERRORS,
        ),
    )
    async def completions(request: Request) -> Response:
        body = await deps.bodies.read(request, CompletionRequest)
        lease = _lease(deps, request, body.model)
        try:
            return await _start_completion(deps, body, lease)
        except BaseException:
            lease.release()
            raise

    return router


def _lease(deps: ServerDeps, request: Request, model: str) -> Lease:
    """Hold the model that a request asks for, and note it in the request's log record."""
    record = request_record(request.scope)
    record.ask(model)
    lease = deps.adapters.lease(model)
    record.version = lease.version
    return lease


async def _start_chat(deps: ServerDeps, body: ChatRequest, lease: Lease) -> GenerationResponse:
    params = chat_params(body)
    deps.waiting.refuse_if_full(params.n, param="n")
    prompt = await deps.text.prompts.encode_chat(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_options=body.chat_template_kwargs,
    )
    try:
        deps.text.check([prompt], params)
    except InvalidRequestError as error:
        if error.param == "prompt":
            raise type(error)(str(error), param="messages") from None
        raise
    generation = _generation("chatcmpl", [prompt], params, lease, body)
    chat_format = ChatFormat(
        request_id=generation.request_id,
        created=now_unix_s(),
        model=body.model,
        with_logprobs=params.logprobs is not None,
        include_usage=generation.include_usage,
    )
    return _response(deps, generation, chat_format)


async def _start_completion(deps: ServerDeps, body: CompletionRequest, lease: Lease) -> GenerationResponse:
    params = completion_params(body)
    num_choices = _num_prompts(body) * params.n
    if num_choices > MAX_CHOICES_PER_REQUEST:
        raise InvalidRequestError(
            f"{num_choices // params.n} {plural('prompt', num_choices // params.n)} with n = {params.n} make "
            f"more than {MAX_CHOICES_PER_REQUEST} choices; send several requests",
            param="prompt",
        )
    deps.waiting.refuse_if_full(num_choices)
    prompts = await _prompts(deps.text.prompts, body)
    deps.text.check(prompts, params)
    prompt_only = body.max_tokens == 0
    generation = _generation("cmpl", prompts, params, lease, body, prompt_only=prompt_only)
    completion_format = CompletionFormat(
        request_id=generation.request_id,
        created=now_unix_s(),
        model=body.model,
        with_logprobs=params.logprobs is not None,
        include_usage=generation.include_usage,
        num_siblings=params.n,
        echo=await _echoed(deps.text, body, prompts) if body.echo else None,
        prompt_only=prompt_only,
    )
    return _response(deps, generation, completion_format)


def _generation(
    prefix: str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    lease: Lease,
    body: SamplingFields,
    *,
    prompt_only: bool = False,
) -> Generation:
    return Generation(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        prompts=prompts,
        params=params,
        lease=lease,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        prompt_only=prompt_only,
    )


def _response(deps: ServerDeps, generation: Generation, answer_format: AnswerFormat) -> GenerationResponse:
    ticket = deps.waiting.admit(generation.prompts, generation.params.n)
    num_prompt_tokens = sum(map(len, generation.prompts))
    meter = deps.metrics.meter(
        adapter=generation.lease.name,
        num_prompt_tokens=num_prompt_tokens,
        num_choices=len(generation.prompts) * generation.params.n,
    )
    return GenerationResponse(
        text=deps.text,
        generation=generation,
        answer_format=answer_format,
        meter=meter,
        ticket=ticket,
        pacer=deps.pacer,
    )


def _num_prompts(body: CompletionRequest) -> int:
    """Prompts of a request, counted without going through their tokens."""
    prompt = body.prompt
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


async def _prompts(encoder: PromptEncoder, body: CompletionRequest) -> list[list[int]]:
    """The four forms of `prompt` as lists of token ids."""
    special = body.add_special_tokens is not False
    if isinstance(body.prompt, str):
        _refuse_empty([body.prompt])
        return await encoder.encode_texts([body.prompt], add_special_tokens=special)
    items = body.prompt
    if not items:
        raise InvalidRequestError("prompt is an empty list", param="prompt")
    if all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    if all(isinstance(item, str) for item in items):
        texts = [item for item in items if isinstance(item, str)]
        _refuse_empty(texts)
        return await encoder.encode_texts(texts, add_special_tokens=special)
    if all(isinstance(item, list) for item in items):
        return [item for item in items if isinstance(item, list)]
    raise InvalidRequestError(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, not a mixture",
        param="prompt",
    )


def _refuse_empty(texts: Sequence[str]) -> None:
    """Of the text and not of its tokens: many tokenizers make a beginning-of-text token of nothing."""
    if "" in texts:
        raise InvalidRequestError("prompt is empty; give at least one character", param="prompt")


async def _echoed(
    text_engine: TextEngine, body: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[EchoedPrompt]:
    """What `echo` repeats: the texts as they were sent, or the texts of the tokens."""
    tokenizer, given = text_engine.tokenizer, body.prompt

    def echo() -> list[EchoedPrompt]:
        if isinstance(given, str):
            texts = [given]
        elif isinstance(given[0], str):
            texts = [item for item in given if isinstance(item, str)]
        else:
            texts = [tokenizer.decode(prompt) for prompt in prompts]
        return [
            EchoedPrompt(
                text=text,
                token_offsets=() if body.logprobs is None else prompt_offsets(tokenizer.pieces, prompt, text),
            )
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    return await text_engine.prompts.call(echo, num_tokens=sum(map(len, prompts)))
