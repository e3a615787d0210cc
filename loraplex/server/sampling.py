"""Convert the fields of a request to SamplingParams."""

from __future__ import annotations

from typing import Final, TypeVar

from loraplex.core.errors import InvalidRequestError
from loraplex.core.sampling import SamplingParams
from loraplex.server.output_format import structured_output
from loraplex.server.requests import ChatRequest, CompletionRequest, SamplingFields

V = TypeVar("V")

# OpenAI's default for /v1/completions; chat continues to the end of the context.
_DEFAULT_COMPLETION_TOKENS: Final = 16


def chat_params(request: ChatRequest) -> SamplingParams:
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = request.max_completion_tokens
    if max_tokens is None:
        max_tokens = request.max_tokens
    if max_tokens == 0:
        raise InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(
        request,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        best_of=request.best_of,
    )


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters. With `echo` and max_tokens 0 only the prompt is wanted: one token is
    generated, which the caller drops."""
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(_DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
    if max_tokens == 0:
        if not request.echo:
            raise InvalidRequestError("max_tokens may be 0 only together with echo", param="max_tokens")
        max_tokens = 1
    return _params(
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_most(request.logprobs if request.echo else None, request.prompt_logprobs),
        best_of=request.best_of,
    )


def _params(
    request: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    best_of: int | None,
) -> SamplingParams:
    n = _or(request.n, 1)
    if best_of is not None and best_of != n:
        raise InvalidRequestError("best_of is supported only when it equals n", param="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not available in a stream; leave stream out, or use echo and logprobs",
            param="prompt_logprobs",
        )
    stop = request.stop
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_or(request.min_tokens, 0),
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(_or(request.top_k, 0), 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple((_token_id(token), bias) for token, bias in (request.logit_bias or {}).items()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
        structured_output=structured_output(request),
        bad_words=tuple(request.bad_words or ()),
    )


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise InvalidRequestError(f"logit_bias: {text!r} is not a token id", param="logit_bias")
    return int(text)


def _most(first: int | None, second: int | None) -> int | None:
    return max((each for each in (first, second) if each is not None), default=None)


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
