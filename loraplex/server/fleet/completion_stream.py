"""Parse the streamed answer of /v1/completions into engine outputs.

    bytes ──▶ SseParser ──▶ payloads ──▶ CompletionReader ──▶ EngineOutput, merged from all that has arrived

vLLM sends a token's log-probability with the token, loraplex with the token's text, which may be a chunk
later. Both send them in order, so tokens wait for theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec

from loraplex.core.errors import AdapterError, EngineDeadError, LoraplexError, UserError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason, TokenLogprob
from loraplex.server.fleet.backend_errors import ErrorDetail, stream_error
from loraplex.server.fleet.completion_body import asked_logprobs

_DONE: Final = b"[DONE]"
_IMPOSSIBLE: Final = -9999.0
"""Stands for minus infinity, which JSON does not have, in the answers of both servers."""
_ID_PREFIX: Final = "token_id:"


class SseParser:
    """Parses server-sent events from bytes that arrive in arbitrary pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of all complete lines."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: ErrorDetail | str | None = None


_decoder: Final = msgspec.json.Decoder(_Event)


class CompletionReader:
    """Assembles the outputs of one request. `url` is for error messages. `vocab_size`: that of the base
    model; None if it is unknown."""

    def __init__(self, request: EngineRequest, url: str, vocab_size: int | None = None) -> None:
        params = request.params
        self._request, self._url = request, url
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        self._parser = SseParser()
        self._num_asked = asked_logprobs(params)
        self._num_top = params.logprobs
        self._num_prompt_top = params.prompt_logprobs
        self._num_prompt_entries = 0 if params.prompt_logprobs is None else len(request.prompt_token_ids)

        self._tokens: list[int] = []
        self._entries: list[TokenLogprob] = []
        self._prompt_entries: list[TokenLogprob | None] = []
        self._is_prompt_sent = params.prompt_logprobs is None
        self._num_cached_tokens = 0
        self._finish: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Return whether the stream has ended."""
        return self._ended

    def feed(self, data: bytes) -> None:
        """Add bytes of the body; empty bytes mean its end. Raises the error that the server reports, and
        EngineDeadError for a body that ends before the answer does."""
        for payload in self._parser.feed(data):
            self._take_event(payload)
        if data:
            return
        self._ended = True
        if self._finish is None:
            raise EngineDeadError(
                f"the server at {self._url} ended the connection before the answer was done"
            )

    def _take_event(self, payload: bytes) -> None:
        if payload == _DONE:
            self._ended = True
            return
        try:
            event = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise self._nonsense(str(error)) from None
        if event.error is not None:
            self._fail(event.error)
        for choice in event.choices:
            self._add(choice)
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self._num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0

    def take(self) -> EngineOutput | None:
        """Return everything that is complete and was not taken yet; None if there is nothing.

        The last output waits for the end of the stream, because the usage after it has the cached tokens.
        """
        if self._finish is not None and not self._ended:
            return None
        num_ready = len(self._tokens)
        if self._num_top is not None and self._finish is None:
            num_ready = min(num_ready, len(self._entries))
        if num_ready == 0 and self._finish is None:
            return None
        tokens, entries = self._tokens[:num_ready], self._entries[:num_ready]
        del self._tokens[:num_ready], self._entries[:num_ready]
        if self._num_top is not None and len(entries) < num_ready:
            raise self._nonsense("fewer log-probabilities than tokens")
        prompt_logprobs = None
        if not self._is_prompt_sent and self._num_prompt_entries == len(self._prompt_entries):
            prompt_logprobs, self._is_prompt_sent = tuple(self._prompt_entries), True
        return EngineOutput(
            request_id=self._request.request_id,
            token_ids=tuple(tokens),
            logprobs=tuple(entries),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            finish_reason=self._finish,
            stop_token_id=self._stop_token_id,
        )

    def _add(self, choice: _Choice) -> None:
        if choice.token_ids is None and (choice.text or choice.finish_reason is not None):
            raise self._nonsense("no token ids; vLLM sends them since 0.10.2")
        self._check_ids(choice.token_ids or ())
        self._tokens += choice.token_ids or ()
        if choice.logprobs is not None and self._num_asked is not None:
            self._add_logprobs(choice.logprobs, self._num_asked)
        if choice.finish_reason is None:
            return
        self._finish = FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP
        if choice.finish_reason not in ("length", "stop"):
            raise EngineDeadError(f"the server at {self._url} ended the request ({choice.finish_reason})")
        if self._finish is FinishReason.STOP and choice.token_ids and not isinstance(choice.stop_reason, str):
            # No stop strings were sent, so a token ended it, and it is the last one.
            self._stop_token_id = self._tokens.pop()
        del self._entries[len(self._tokens) :]  # vLLM has one for the stop token

    def _add_logprobs(self, logprobs: _Logprobs, num_asked: int) -> None:
        rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
        missing = self._num_prompt_entries - len(self._prompt_entries)
        try:
            for token, logprob, top in islice(rows, missing):
                assert self._num_prompt_top is not None
                entry = None if logprob is None else self._entry(token, logprob, top, num_asked)
                self._prompt_entries.append(None if entry is None else _cut(entry, self._num_prompt_top))
            if self._num_top is not None:
                for token, logprob, top in rows:
                    entry = self._entry(token, logprob or 0.0, top, num_asked)
                    self._entries.append(_cut(entry, self._num_top))
        except ValueError:
            raise self._nonsense("log-probabilities without token ids") from None

    def _entry(
        self, token: str, logprob: float, top: dict[str, float] | None, num_asked: int
    ) -> TokenLogprob:
        entry = _entry(token, logprob, top, num_asked)
        self._check_ids([entry.token_id, *(token_id for token_id, _ in entry.top)])
        return entry

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise EngineDeadError for ids outside the vocabulary, which could not be decoded to text."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._vocab_size):
            wrong = next(each for each in token_ids if not 0 <= each < self._vocab_size)
            raise self._nonsense(
                f"token {wrong} is not in the base model's vocabulary", "start it with the same base model"
            )

    def _fail(self, error: ErrorDetail | str) -> None:
        detail = ErrorDetail(message=error) if isinstance(error, str) else error
        raise stream_error(detail, self._url)

    def _nonsense(self, what: str, fix: str | None = None) -> EngineDeadError:
        message = f"the server at {self._url} sent what cannot be read as a completion ({what})"
        return EngineDeadError(message if fix is None else f"{message}; {fix}")


def failed_output(request: EngineRequest, error: LoraplexError) -> EngineOutput | None:
    """Return the last output of a request that failed alone while it ran; None if the error must be
    raised."""
    is_adapters = isinstance(error, AdapterError)
    if isinstance(error, EngineDeadError) or (isinstance(error, UserError) and not is_adapters):
        return None
    return EngineOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=str(error),
        error_param="model" if is_adapters else None,
    )


def _entry(token: str, logprob: float, top: dict[str, float] | None, num_asked: int) -> TokenLogprob:
    """Return the log-probabilities of one position. `top` also has the token itself, even if it is not one of
    the likeliest."""
    likeliest = dict(top or {})
    if len(likeliest) > num_asked:
        likeliest.pop(token, None)
    ranked = sorted(likeliest.items(), key=lambda item: -item[1])
    return TokenLogprob(
        token_id=_token_id(token),
        logprob=_restored(logprob),
        top=tuple((_token_id(name), _restored(value)) for name, value in ranked[:num_asked]),
    )


def _cut(entry: TokenLogprob, num_top: int) -> TokenLogprob:
    if len(entry.top) <= num_top:
        return entry
    return TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=entry.top[:num_top])


def _token_id(name: str) -> int:
    """Return the id in `token_id:42`. Raises ValueError for anything else."""
    if not name.startswith(_ID_PREFIX):
        raise ValueError(name)
    return int(name.removeprefix(_ID_PREFIX))


def _restored(logprob: float) -> float:
    return -math.inf if logprob <= _IMPOSSIBLE else logprob
