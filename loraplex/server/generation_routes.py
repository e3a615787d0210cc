"""POST /v1/chat/completions, /v1/completions and /v1/responses."""

from __future__ import annotations

import hashlib
import uuid
from contextlib import ExitStack
from functools import partial
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.core.errors import InvalidRequestError
from loraplex.core.tenants import BATCH_PRIORITY, Caller
from loraplex.engine.text_engine import CheckedPrompts
from loraplex.server.answer_reader import AnswerReading
from loraplex.server.chat_format import ChatFormat
from loraplex.server.chat_plan import plan_chat, shown_special_ids
from loraplex.server.chat_prompt import chat_prompt
from loraplex.server.completion_format import CompletionFormat
from loraplex.server.completion_prompt import count_choices, cut_prompt, encode_prompts
from loraplex.server.deps import ServerDeps
from loraplex.server.disconnect import run_until_disconnect
from loraplex.server.errors import counts_for_tenant
from loraplex.server.generation import AnswerFormat, Generation, GenerationResponse, now_unix_s
from loraplex.server.generation_responses import ChatCompletion, Completion
from loraplex.server.generation_responses import Response as ResponseObject
from loraplex.server.openapi import operation
from loraplex.server.request_log import BATCH_KIND, request_record
from loraplex.server.requests import ChatRequest, CompletionRequest, SamplingFields
from loraplex.server.response_api.format import ResponsesFormat
from loraplex.server.response_api.request import ResponsesRequest, chat_request, renamed
from loraplex.server.sampling import chat_params, completion_params
from loraplex.server.tenants.access import access_of
from loraplex.server.tenants.account import Spending
from loraplex.server.version_use import Lease
from loraplex.server.waiting import WaitingTicket

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
        async with deps.bodies.read(request, ChatRequest) as body:
            return await _start_chat(deps, request, body)

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
        async with deps.bodies.read(request, CompletionRequest) as body:
            return await _start_completion(deps, request, body)

    @router.post(
        "/v1/responses",
        **operation(
            summary="Answer a conversation, in the format of OpenAI's responses",
            body=ResponsesRequest,
            answer=ResponseObject,
            streams=True,
            errors=_ERRORS,
        ),
    )
    async def responses(request: Request) -> Response:
        async with deps.bodies.read(request, ResponsesRequest) as body:
            try:
                return await _start_chat(deps, request, chat_request(body), asked=body)
            except InvalidRequestError as error:
                raise renamed(error) from None

    return router


def _lease(deps: ServerDeps, request: Request, body: SamplingFields) -> Lease:
    """Lease the model that a request names, and note it in the request's log record.

    If the name has a canary, a user named by the request is always answered by the same version.
    """
    record = request_record(request.scope)
    if access_of(request.scope).account is None:
        record.late_headers = deps.waiting.headers
    name = _model_name(deps, body)
    record.ask(name)
    key = body.user or body.safety_identifier or record.request_id
    lease = deps.adapters.lease(name, key=key, access=access_of(request.scope))
    record.version = lease.version
    return lease


def _model_name(deps: ServerDeps, body: SamplingFields) -> str:
    """Return the model that a request names. LoRAX's clients name an adapter beside the base model."""
    if not body.adapter_id:
        return body.model
    if body.model not in ("", deps.adapters.base_model, body.adapter_id):
        raise InvalidRequestError(
            f"model is {body.model[:1024]!r} and adapter_id {body.adapter_id!r}; send one of them as "
            f"both, or the base model {deps.adapters.base_model!r} as model",
            param="adapter_id",
        )
    return body.adapter_id


async def _start_chat(
    deps: ServerDeps, request: Request, body: ChatRequest, *, asked: ResponsesRequest | None = None
) -> GenerationResponse:
    """Begin the answer to a chat. `asked`: the request that the chat was made of, whose format it has."""
    with ExitStack() as on_failure:
        lease = _lease(deps, request, body)
        on_failure.callback(lease.release)
        params = chat_params(body)
        spending = _spending(request, params.n, on_failure, param="n")
        caller = _caller(request, lease, body)
        ticket = deps.waiting.admit(params.n, adapter=lease.version, param="n", caller=caller)
        on_failure.callback(ticket.close)
        made = await run_until_disconnect(chat_prompt(deps, body), request.receive, deps.pacer)
        prompt = cut_prompt(made.token_ids, body, params, deps.text)
        plan = await deps.text.prompts.call(
            partial(
                plan_chat,
                body,
                params,
                prompt,
                made.tools,
                template=made.template,
                tokenizer=deps.text.tokenizer,
                options=deps.chat,
            ),
            num_tokens=0 if made.tools is None else made.tools.num_bytes,
        )
        await deps.text.check_structure(plan.params, plan.parts)
        try:
            checked = deps.text.check([prompt], plan.params)
            _spend(spending, checked)
        except InvalidRequestError as error:
            if error.param == "prompt":
                raise type(error)(str(error), param="messages") from None
            raise
        generation = _generation(
            caller,
            "chatcmpl-" if asked is None else "resp_",
            checked,
            lease,
            body,
            shown_ids=plan.shown_ids,
            include_usage=asked is not None,
        )
        chat_format = _chat_format(
            generation,
            body,
            asked,
            model=_model_name(deps, body),
            with_logprobs=params.logprobs is not None,
            reading=plan.reading,
            prompt=prompt,
        )
        response = _response(deps, request, generation, chat_format, ticket, spending)
        on_failure.pop_all()  # the response releases them
        return response


def _chat_format(
    generation: Generation,
    body: ChatRequest,
    asked: ResponsesRequest | None,
    *,
    model: str,
    with_logprobs: bool,
    reading: AnswerReading | None,
    prompt: list[int],
) -> AnswerFormat:
    if asked is not None:
        return ResponsesFormat(
            request_id=generation.request_id,
            created=now_unix_s(),
            model=model,
            body=asked,
            reading=reading,
        )
    return ChatFormat(
        request_id=generation.request_id,
        created=now_unix_s(),
        model=model,
        with_logprobs=with_logprobs,
        include_usage=generation.include_usage,
        reading=reading,
        prompt_ids=prompt if body.return_token_ids else None,
        num_prompt_top=body.prompt_logprobs,
    )


async def _start_completion(
    deps: ServerDeps, request: Request, body: CompletionRequest
) -> GenerationResponse:
    with ExitStack() as on_failure:
        lease = _lease(deps, request, body)
        on_failure.callback(lease.release)
        params = completion_params(body)
        num_choices = count_choices(body, params)
        spending = _spending(request, num_choices, on_failure)
        caller = _caller(request, lease, body)
        ticket = deps.waiting.admit(
            num_choices,
            adapter=lease.version,
            was_admitted=bool(body.output_token_ids) and access_of(request.scope).is_operator,
            caller=caller,
        )
        on_failure.callback(ticket.close)
        encoding = encode_prompts(deps.text, body, params)
        checked, echoed = await run_until_disconnect(encoding, request.receive, deps.pacer)
        _spend(spending, checked, num_begun=len(body.output_token_ids or ()))
        prompt_only = body.max_tokens == 0
        generation = _generation(
            caller,
            "cmpl-",
            checked,
            lease,
            body,
            prompt_only=prompt_only,
            output_token_ids=tuple(body.output_token_ids or ()),
            shown_ids=shown_special_ids(body, deps.text.tokenizer),
        )
        completion_format = CompletionFormat(
            request_id=generation.request_id,
            created=now_unix_s(),
            model=_model_name(deps, body),
            with_logprobs=params.logprobs is not None,
            include_usage=generation.include_usage,
            num_siblings=params.n,
            echo=echoed,
            prompt_only=prompt_only,
            prompt_ids=checked.prompts if body.return_token_ids else None,
            logprobs_by_id=bool(body.return_tokens_as_token_ids),
            num_top=body.logprobs,
            num_prompt_top=body.prompt_logprobs,
        )
        response = _response(deps, request, generation, completion_format, ticket, spending)
        on_failure.pop_all()  # the response releases them
        return response


def _caller(request: Request, lease: Lease, body: SamplingFields) -> Caller:
    """Return whose request it is, for decisions about who is served when not all can be, and about caches."""
    access, priority = access_of(request.scope), body.priority or 0
    # A front of the operator's sends lines of batches on by their priority.
    may_be_line = access.is_operator or request_record(request.scope).key_kind == BATCH_KIND
    if priority >= BATCH_PRIORITY and not may_be_line:
        raise InvalidRequestError(
            f"priority {priority:,} is kept for the lines of batches; "
            f"send a lower one than {BATCH_PRIORITY:,}",
            param="priority",
        )
    slo_ttft_s, slo_tpt_s = access.slos_of(lease.name)
    return Caller(
        tenant=access.tenant,
        priority=priority,
        slo_ttft_s=slo_ttft_s,
        slo_tpt_s=slo_tpt_s,
        cache_salt=_salt(access.cache_salt, body.cache_salt),
    )


def _spending(
    request: Request, num_choices: int, on_failure: ExitStack, *, param: str = "prompt"
) -> Spending | None:
    """Count a request of a tenant, if it is one, within the tenant's limits. Raises QuotaError beyond them. A
    request that is refused later on, or fails because of the server, is not counted."""
    account = access_of(request.scope).account
    if account is None:
        return None
    spending = account.admit(num_choices, param=param)

    def close(kind: object, error: BaseException | None, traceback: object) -> None:
        spending.close(is_refused=not counts_for_tenant(error))

    on_failure.push(close)
    return spending


def _spend(spending: Spending | None, checked: CheckedPrompts, *, num_begun: int = 0) -> None:
    """Count the tokens of the prompts, and `num_begun` of an answer begun elsewhere, which are computed like
    them; raises as `_spending` does."""
    if spending is not None:
        most = max(params.max_tokens or 0 for params in checked.fitted)
        spending.encoded(sum(map(len, checked.prompts)) + num_begun, most - num_begun)


def _generation(
    caller: Caller,
    prefix: str,
    checked: CheckedPrompts,
    lease: Lease,
    body: SamplingFields,
    *,
    prompt_only: bool = False,
    output_token_ids: tuple[int, ...] = (),
    shown_ids: frozenset[int] = frozenset(),
    include_usage: bool = False,
) -> Generation:
    return Generation(
        request_id=f"{prefix}{uuid.uuid4().hex}",
        checked=checked,
        lease=lease,
        stream=bool(body.stream),
        include_usage=include_usage
        or (body.stream_options is not None and bool(body.stream_options.include_usage)),
        prompt_only=prompt_only,
        output_token_ids=output_token_ids,
        shown_ids=shown_ids,
        caller=caller,
    )


def _salt(of_tenant: str, of_request: str | None) -> str:
    """Return the salt of a request, which no other tenant can have: a tenant's name has no slash. It has few
    characters, as a server behind this one limits them too."""
    if of_request is None:
        return of_tenant
    return f"{of_tenant}/{hashlib.sha256(of_request.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _response(
    deps: ServerDeps,
    request: Request,
    generation: Generation,
    answer_format: AnswerFormat,
    ticket: WaitingTicket,
    spending: Spending | None,
) -> GenerationResponse:
    checked = generation.checked
    ticket.encoded(checked.prompts, checked.params.n)
    is_line = generation.caller.priority >= BATCH_PRIORITY
    meter = deps.metrics.meter(
        adapter=generation.lease.name,
        is_canary=generation.lease.is_canary,
        num_prompt_tokens=sum(map(len, checked.prompts)),
        num_prompts=len(checked.prompts),
        num_choices=checked.num_choices,
        arrival_s=request_record(request.scope).arrival_s,
        objective=None if is_line else access_of(request.scope).objective(generation.lease.name),
    )
    return GenerationResponse(
        text=deps.text,
        generation=generation,
        answer_format=answer_format,
        meter=meter,
        ticket=ticket,
        spending=spending,
        pacer=deps.pacer,
        is_resampled=deps.is_resampled,
    )
