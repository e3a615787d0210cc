"""A request's answer so far, and the request that continues it on another engine.

    attempt   request                               outputs            reported to the client
    1         prompt                                a b c †            a b c
    2         prompt, output a b c                  d e †              d e
    3         prompt, output a b c d e              f, finished        f, finished

An engine that is given a continuation produces the tokens that the first engine would have produced:
penalties, lengths and seeds count the whole answer. Without a seed, the continuation samples with new random
draws.
"""

from __future__ import annotations

from dataclasses import replace

from loraplex.core.request import EngineOutput, EngineRequest, FinishReason


def continued(
    request: EngineRequest, token_ids: tuple[int, ...], *, has_prompt_logprobs: bool = True
) -> EngineRequest:
    """Return the request that continues after these output tokens.

    `has_prompt_logprobs`: prompt logprobs, if requested, were already received and are not requested again.
    """
    if not token_ids:
        return request
    params = request.params
    if has_prompt_logprobs and params.prompt_logprobs is not None:
        params = params.changed(prompt_logprobs=None)
    return replace(request, params=params, output_token_ids=(*request.output_token_ids, *token_ids))


class AnswerSoFar:
    """The outputs of a request's attempts, joined into one answer."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._num_attempts = 0
        self._is_queued = False
        self._has_prompt_logprobs = False
        self._num_cached_tokens = 0
        self._adapter_hit: bool | None = None

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def attempt(self) -> EngineRequest:
        """Return the request for the next attempt.

        Each attempt has its own id: an engine that was given up may still send outputs of an earlier attempt.
        """
        number, self._num_attempts = self._num_attempts, self._num_attempts + 1
        rest = continued(self._request, tuple(self._token_ids), has_prompt_logprobs=self._has_prompt_logprobs)
        return rest if number == 0 else replace(rest, request_id=attempt_id(self.request_id, number))

    def add(self, output: EngineOutput) -> EngineOutput | None:
        """Record the next output of the latest attempt and return it as the client should see it.

        Returns None if it adds nothing: an output without tokens is passed on only once, when the request is
        first queued.
        """
        is_news = bool(output.token_ids) or output.finish_reason is not None or not self._is_queued
        self._is_queued = True
        if not is_news:
            return None
        if self._num_attempts > 1:
            output = self._as_one(output)
        self._token_ids += output.token_ids
        if output.token_ids:
            self._num_cached_tokens, self._adapter_hit = output.num_cached_tokens, output.adapter_hit
        if output.prompt_logprobs is not None:
            self._has_prompt_logprobs = True
        return output

    def missing_end(self) -> EngineOutput | None:
        """Return the final output of an answer that has all its tokens but whose engine died before it said
        so.

        Returns None if tokens are still missing.
        """
        max_tokens = self._request.params.max_tokens
        if max_tokens is None or self.num_tokens + len(self._request.output_token_ids) < max_tokens:
            return None
        return self._as_one(EngineOutput(request_id=self.request_id, finish_reason=FinishReason.LENGTH))

    def _as_one(self, output: EngineOutput) -> EngineOutput:
        """Return an output of a later attempt with the first attempt's id and cache figures.

        Prefix cache and adapter hits of later attempts are due to earlier attempts, so they are not reported.
        """
        output = replace(output, request_id=self.request_id)
        if not self._token_ids:
            return output
        return replace(output, num_cached_tokens=self._num_cached_tokens, adapter_hit=self._adapter_hit)


def attempt_id(request_id: str, number: int) -> str:
    """Return the id of a later attempt; `request_id_of` is the inverse."""
    return f"{request_id}+{number}"


def request_id_of(attempt_id: str) -> str:
    return attempt_id.partition("+")[0]
