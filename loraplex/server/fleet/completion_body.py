"""Convert an engine request to a body of /v1/completions: token ids in, token ids out."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from loraplex.core.errors import InvalidRequestError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.server.output_format import as_structured_outputs
from loraplex.server.replica import Continuation

_MAX_VLLM_TEMPERATURE: Final = 2.0


class BackendKind(StrEnum):
    """The servers whose API is known here, by the owner that /v1/models reports for their models."""

    VLLM = "vllm"
    LORAPLEX = "loraplex"


def continuation(request: EngineRequest, kind: BackendKind) -> Continuation:
    """Return how the server would continue a request with output tokens.

    loraplex accepts the output so far as such. vLLM gets it as part of the prompt: its random draws start
    over, and penalties that count only the output miss it. The repetition penalty also counts the prompt.
    """
    params = request.params
    if params.prompt_logprobs is not None:  # they could not be told apart from those of the output so far
        return Continuation.IMPOSSIBLE
    if kind is BackendKind.LORAPLEX:
        return Continuation.SAME
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        return Continuation.IMPOSSIBLE
    if params.structured_output is not None:  # the schema would begin anew
        return Continuation.IMPOSSIBLE
    if params.bad_words:  # one could begin in the output so far, which is a prompt then
        return Continuation.IMPOSSIBLE
    return Continuation.SAME if params.greedy or params.seed is None else Continuation.RESAMPLED


def asked_logprobs(params: SamplingParams) -> int | None:
    """Return how many of the likeliest tokens are requested per position of prompt or output; None for
    none."""
    wanted = [count for count in (params.logprobs, params.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


def completion_body(
    request: EngineRequest, *, model: str, kind: BackendKind, max_model_len: int
) -> dict[str, Any]:
    """Return the body that asks for the same tokens. Raises InvalidRequestError for what the server does not
    support.

    All fields are sent: vLLM takes defaults for missing ones from the model's generation_config.json. Stop
    strings are matched by the caller, which has the text, and `n` was expanded. vLLM gets the output so far
    as part of the prompt (`continuation`).
    """
    params = request.params
    _refuse_unknown(params, kind)
    prompt, earlier, num_counted = request.prompt_token_ids, list(request.output_token_ids), 0
    if kind is BackendKind.VLLM and earlier:
        prompt, earlier, num_counted = [*prompt, *earlier], [], len(earlier)
    logprobs, max_tokens = asked_logprobs(params), params.max_tokens
    if max_tokens is None:
        max_tokens = max(1 + num_counted, max_model_len - len(request.prompt_token_ids))
    stop_token_ids = list(params.stop_token_ids)
    if not params.ignore_eos:  # the caller's tokenizer decides, not the server's
        stop_token_ids += [token for token in request.eos_token_ids if token not in stop_token_ids]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": max_tokens - num_counted,
        "min_tokens": max(0, params.min_tokens - num_counted),
        "temperature": 0.0 if params.greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": params.ignore_eos,
    }
    if earlier:
        body["output_token_ids"] = earlier
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if params.seed is not None:
        body["seed"] = params.seed
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if logprobs is not None:
        body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
    if params.structured_output is not None:
        body["structured_outputs"] = as_structured_outputs(params.structured_output)
    if params.bad_words:
        body["bad_words"] = list(params.bad_words)
    if request.priority and kind is BackendKind.LORAPLEX:  # vLLM refuses it unless it schedules by it
        body["priority"] = request.priority
    if params.prompt_logprobs is not None:
        body["echo"] = True  # the only way to get them in a stream
    return body


def _refuse_unknown(params: SamplingParams, kind: BackendKind) -> None:
    if kind is BackendKind.VLLM and params.temperature > _MAX_VLLM_TEMPERATURE:
        raise InvalidRequestError(
            f"temperature is {params.temperature:g}; the vLLM servers behind this address take at most "
            f"{_MAX_VLLM_TEMPERATURE:g}",
            param="temperature",
        )
