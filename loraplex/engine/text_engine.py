"""Text on top of a token-level engine: prompts in, deltas of text out.

prompts × n ──▶ one EngineRequest for each choice ──▶ AsyncEngine
                                                         │ EngineOutput
TextDelta batches ◀── stop strings ◀── detokenizer ◀─────┘
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, cast

from loraplex.core.errors import AdapterError, InvalidRequestError, LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason, PhaseTimes, TokenLogprob
from loraplex.core.sampling import SamplingParams
from loraplex.core.structured_output import StructuredOutput
from loraplex.core.tenants import NOBODY, Caller
from loraplex.engine.bad_words import bad_word_ids
from loraplex.engine.grammars import check_structured_output
from loraplex.engine.interface import AsyncEngine
from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.request_checks import check_prompt, check_token_ids, fit_max_tokens
from loraplex.engine.stop_strings import StopMatcher, StopStrings
from loraplex.engine.tokenizer import Tokenizer

_STARTED_AT_ONCE: Final = 16
"""Choices of one call to send to the engine before yielding to the event loop."""
_MAX_OPTIONS: Final = 2**17
"""Most biases, stop tokens and tokens of bad words of all choices of a call: each choice is sent to the
engine with its own copy."""


class TopToken(NamedTuple):
    """One of the likeliest tokens at a position."""

    token_id: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobText:
    """A token with its bytes and log-probability, and the likeliest tokens at its position (best first).

    `logprob` is None only for the first prompt token. A special token has its name as `piece`, but is not
    part of the text. `offset`: the character of the choice's text at which the token begins; None for prompt
    tokens. Where a stop string cut the text, it is at most the text's length.
    """

    token_id: int
    piece: bytes
    logprob: float | None
    special: bool = False
    offset: int | None = None
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """Text and tokens added to one choice. The last delta of a choice has a `finish_reason`.

    `choice` counts through prompts × n: prompt `choice // n`. `num_sampled`: number of tokens the model
    generated: those in `token_ids`, and the stop token that is not part of the answer, `end_token_id`.
    `logprobs` may come later than their tokens, with the text they belong to. `stop`: the stop string or
    token that ended the choice. `prompt_logprobs`: sent once, with the first delta, if requested. `times`:
    likewise, of a traced request.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    num_sampled: int
    logprobs: tuple[LogprobText, ...] = ()
    prompt_logprobs: tuple[LogprobText, ...] | None = None
    num_cached_tokens: int = 0
    adapter_hit: bool | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    end_token_id: int | None = None
    times: PhaseTimes | None = None

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """All tokens that the model generated, including a stop token at the end."""
        return self.token_ids if self.end_token_id is None else (*self.token_ids, self.end_token_id)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was generated yet: the engine has only queued the choice."""
        return not self.token_ids and self.finish_reason is None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPrompts:
    """Prompts and options that passed `TextEngine.check`. `fitted`: the options for each prompt, with
    `max_tokens` set."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    fitted: Sequence[SamplingParams]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


class TextEngine:
    """Validates requests, runs them on an AsyncEngine and returns text."""

    def __init__(
        self, *, engine: AsyncEngine, tokenizer: Tokenizer, max_model_len: int, vocab_size: int
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.prompts = PromptEncoder(tokenizer, max_model_len=max_model_len)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> CheckedPrompts:
        """Raise InvalidRequestError for anything that is known to be wrong before running."""
        check_token_ids(params, vocab_size=self.vocab_size)
        if params.bad_words:
            words = bad_word_ids(self.tokenizer, params.bad_words, vocab_size=self.vocab_size)
            params = params.changed(bad_word_ids=words)
        _check_options(params, num_choices=len(prompts) * params.n)
        # Lengths first: checking the ids of a prompt that is far too long takes long.
        fitted = [self.check_length(len(prompt), params) for prompt in prompts]
        for prompt in prompts:
            check_prompt(prompt, vocab_size=self.vocab_size)
        return CheckedPrompts(prompts=prompts, params=params, fitted=fitted)

    async def check_structure(self, params: SamplingParams, parts: Sequence[StructuredOutput] = ()) -> None:
        """Raise InvalidRequestError if no answer can look like what is asked for, or no part of an answer
        like one of these `parts`."""

        def check(wanted: Sequence[StructuredOutput]) -> None:
            for each in wanted:
                check_structured_output(each)

        whole = () if params.structured_output is None else (params.structured_output,)
        if parts or whole:
            await asyncio.to_thread(check, (*parts, *whole))

    def check_length(self, num_prompt_tokens: int, params: SamplingParams) -> SamplingParams:
        """Return the options with `max_tokens` set. Raise ContextLengthError if a prompt of this length and
        its answer do not fit the context."""
        return fit_max_tokens(params, num_prompt_tokens=num_prompt_tokens, max_model_len=self.max_model_len)

    def stream(
        self,
        checked: CheckedPrompts,
        *,
        adapter: str | None,
        request_id: str,
        output_token_ids: tuple[int, ...] = (),
        shown_ids: frozenset[int] = frozenset(),
        caller: Caller = NOBODY,
        traceparent: str = "",
    ) -> AsyncGenerator[list[TextDelta], None]:
        """Yield batches of deltas, each with everything since the last one was taken.

        Ends after the last choice has finished. Closing it cancels the requests still running. A failure of
        one choice fails them all. `adapter`: a version, or None for the base model. `output_token_ids`: the
        beginning of each answer, generated elsewhere; stop strings that begin in it are not found.
        `shown_ids`: special tokens whose names are part of the text. `caller`: whose request it is.
        `traceparent`: see EngineRequest.
        """
        params = checked.params
        include_stop = params.include_stop_str_in_output
        stops = StopStrings(params.stop, include_stop=include_stop) if params.stop else None
        requests: Iterator[EngineRequest] = self._expand(
            checked, adapter, request_id, output_token_ids, caller
        )
        if traceparent:
            requests = (replace(each, traceparent=traceparent) for each in requests)
        choices = (
            _Choice(n, self.tokenizer, request, stops, shown_ids) for n, request in enumerate(requests)
        )
        return self._run_one(next(choices)) if checked.num_choices == 1 else self._run_many(choices)

    def _expand(
        self,
        checked: CheckedPrompts,
        adapter: str | None,
        request_id: str,
        output_token_ids: tuple[int, ...],
        caller: Caller,
    ) -> Iterator[EngineRequest]:
        """Yield the requests of all choices. They have no stop strings: an engine has no text."""
        params = checked.params
        for prompt_index, (prompt, fitted) in enumerate(zip(checked.prompts, checked.fitted, strict=True)):
            token_ids, alone = list(prompt), fitted.changed(n=1, stop=())
            for sibling in range(params.n):
                yield EngineRequest(
                    request_id=f"{request_id}-{prompt_index * params.n + sibling}",
                    prompt_token_ids=token_ids,
                    params=alone
                    if params.seed is None
                    else alone.changed(seed=_sibling_seed(params.seed, sibling)),
                    adapter=adapter,
                    eos_token_ids=self.tokenizer.eos_token_ids,
                    output_token_ids=output_token_ids,
                    tenant=caller.tenant,
                    priority=caller.priority,
                    cache_salt=caller.cache_salt,
                    slo_ttft_s=caller.slo_ttft_s,
                    slo_tpt_s=caller.slo_tpt_s,
                )

    async def _run_one(self, choice: _Choice) -> AsyncGenerator[list[TextDelta], None]:
        # No task and no generator but the engine's: every token of a plain stream takes this path, and
        # the engine already merges the outputs of one request while its reader is slow.
        async with aclosing(self._outputs(choice)) as outputs:
            async for output in outputs:
                delta = choice.advance(output)
                yield [delta]
                if delta.finish_reason is not None:
                    return
        raise _ended_early()

    async def _run_many(self, choices: Iterable[_Choice]) -> AsyncGenerator[list[TextDelta], None]:
        mailbox = _Mailbox()

        async def pump(choice: _Choice) -> None:
            try:
                async with aclosing(self._outputs(choice)) as outputs:
                    async for output in outputs:
                        delta = choice.advance(output)
                        mailbox.put(delta)
                        if delta.finish_reason is not None:
                            return
                raise _ended_early()
            except Exception as error:
                mailbox.fail(error)

        tasks: list[asyncio.Task[None]] = []
        try:
            for choice in choices:
                tasks.append(asyncio.create_task(pump(choice)))
                if len(tasks) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            num_open = len(tasks)
            while num_open:
                batch = await mailbox.take()
                num_open -= sum(delta.finish_reason is not None for delta in batch)
                yield batch
        finally:
            for task in tasks:
                task.cancel()
            # Wait, so that the engine has received the cancellations before the caller continues.
            await asyncio.gather(*tasks, return_exceptions=True)

    def _outputs(self, choice: _Choice) -> AsyncGenerator[EngineOutput, None]:
        return cast("AsyncGenerator[EngineOutput, None]", self.engine.generate(choice.request))


class _Choice:
    """The text state of one engine request."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        request: EngineRequest,
        stops: StopStrings | None,
        shown_ids: frozenset[int],
    ) -> None:
        self.request = request
        self._index = index
        self._piece = tokenizer.pieces.piece
        self._special_ids = tokenizer.pieces.special_ids
        params = request.params
        self._with_logprobs = params.logprobs is not None
        before = [*request.prompt_token_ids, *request.output_token_ids]
        self._detokenizer = tokenizer.detokenizer(
            before, with_offsets=self._with_logprobs, shown_ids=shown_ids
        )
        self._num_shown_chars = 0
        self._unshown: list[TokenLogprob] = []
        self._offsets: list[int] = []
        """Offsets of the first entries in `_unshown`."""
        self._matcher = None if stops is None else StopMatcher(stops)
        # Stop strings are not searched for among the first min_tokens tokens.
        self._unchecked_tokens = max(params.min_tokens - len(request.output_token_ids), 0)

    def advance(self, output: EngineOutput) -> TextDelta:
        """Return the delta of an output. Raise if the request failed."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
            raise _failure(output)
        text, stop_string, num_tokens = self._text_of(output.token_ids)
        # A stop token after a stop string was sampled past the end.
        end_token_id = output.stop_token_id if stop_string is None else None
        finish_reason = output.finish_reason
        # An end-of-sequence token is not reported as `stop`, only stop tokens that the caller named.
        stop: str | int | None = output.stop_token_id
        if stop not in self.request.params.stop_token_ids:
            stop = None
        if stop_string is not None:
            finish_reason, stop = FinishReason.STOP, stop_string
        elif finish_reason is not None:
            tail, stop_string = self._scan(self._detokenizer.flush())
            text += tail
            if stop_string is not None:
                finish_reason, stop = FinishReason.STOP, stop_string
            elif self._matcher is not None:
                text += self._matcher.flush()
        return TextDelta(
            choice=self._index,
            text=text,
            token_ids=output.token_ids[:num_tokens],
            num_sampled=num_tokens + (end_token_id is not None),
            logprobs=self._logprobs(output.logprobs[:num_tokens], text, ended=finish_reason is not None)
            if self._with_logprobs
            else (),
            prompt_logprobs=self._prompt_logprobs(output),
            num_cached_tokens=output.num_cached_tokens,
            adapter_hit=output.adapter_hit,
            finish_reason=finish_reason,
            stop=stop,
            end_token_id=end_token_id,
            times=output.times,
        )

    def _text_of(self, token_ids: tuple[int, ...]) -> tuple[str, str | None, int]:
        """Return the text that may be shown after these tokens, the stop string found in it, and the number
        of tokens up to it.

        Works token by token: the result must not depend on how many outputs were merged for a slow reader.
        """
        if self._matcher is None:
            return self._detokenizer.push(token_ids), None, len(token_ids)
        num_free = min(self._unchecked_tokens, len(token_ids))
        self._unchecked_tokens -= num_free
        parts = [self._detokenizer.push(token_ids[:num_free])]
        for num_tokens, token_id in enumerate(token_ids[num_free:], start=num_free + 1):
            shown, stop = self._scan(self._detokenizer.push((token_id,)))
            parts.append(shown)
            if stop is not None:
                return "".join(parts), stop, num_tokens
        return "".join(parts), None, len(token_ids)

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None or not text:
            return text, None
        scan = self._matcher.push(text)
        return scan.text, scan.stop

    def _logprobs(
        self, entries: tuple[TokenLogprob, ...], text: str, *, ended: bool
    ) -> tuple[LogprobText, ...]:
        """Return the entries whose position in the shown text is certain; the others wait for their text."""
        if ended:
            self._detokenizer.flush()  # after a stop string there may be an incomplete character
        self._num_shown_chars += len(text)
        self._unshown += entries
        self._offsets += self._detokenizer.take_offsets()
        limit = self._num_shown_chars
        num_shown = len(self._offsets) if ended else bisect_right(self._offsets, limit)
        shown = tuple(
            self._logprob_text(entry.token_id, entry, offset=min(offset, limit))
            for entry, offset in zip(self._unshown[:num_shown], self._offsets[:num_shown], strict=True)
        )
        del self._unshown[:num_shown], self._offsets[:num_shown]
        return shown

    def _prompt_logprobs(self, output: EngineOutput) -> tuple[LogprobText, ...] | None:
        if output.prompt_logprobs is None:
            return None
        first, *others = output.prompt_logprobs
        assert first is None, "the first token has nothing before it"
        return (
            self._logprob_text(self.request.prompt_token_ids[0], None),
            *(self._logprob_text(entry.token_id, entry) for entry in others if entry is not None),
        )

    def _logprob_text(
        self, token_id: int, entry: TokenLogprob | None, *, offset: int | None = None
    ) -> LogprobText:
        top = () if entry is None else entry.top
        return LogprobText(
            token_id=token_id,
            piece=self._piece(token_id),
            logprob=None if entry is None else entry.logprob,
            special=token_id in self._special_ids,
            offset=offset,
            top=tuple([TopToken(other_id, self._piece(other_id), logprob) for other_id, logprob in top]),
        )


class _Mailbox:
    """Deltas of many choices for one reader, who takes all of them at once.

    Its size is bounded by max_tokens × choices.
    """

    def __init__(self) -> None:
        self._deltas: list[TextDelta] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, delta: TextDelta) -> None:
        self._deltas.append(delta)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def take(self) -> list[TextDelta]:
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None:
            raise self._error
        deltas, self._deltas = self._deltas, []
        return deltas


def _failure(output: EngineOutput) -> LoraplexError:
    if output.finish_reason is FinishReason.CANCELLED:
        return LoraplexError(output.error or "the request was cancelled by the server")
    message = output.error or "the engine failed on this request"
    if output.error_param == "model":
        return AdapterError(message)
    if output.error_param is not None:
        return InvalidRequestError(message, param=output.error_param)
    return LoraplexError(message)


def _ended_early() -> LoraplexError:
    return LoraplexError("the engine ended the request without saying why")


def _check_options(params: SamplingParams, *, num_choices: int) -> None:
    """Refuse a call whose choices together have more options than an engine accepts at once."""
    counts = {
        "logit_bias": len(params.logit_bias),
        "stop_token_ids": len(params.stop_token_ids),
        "bad_words": sum(map(len, params.bad_word_ids)),
    }
    num_options = sum(counts.values())
    if num_options * num_choices > _MAX_OPTIONS:
        raise InvalidRequestError(
            f"{num_choices} choices with {num_options} entries of logit_bias, stop_token_ids and tokens of "
            f"bad_words each are more than the {_MAX_OPTIONS:,} entries a request may have; send fewer "
            "choices in one request",
            param=max(counts, key=lambda name: counts[name]),
        )


def _sibling_seed(seed: int | None, sibling: int) -> int | None:
    """Return the seed of one of n choices. The first uses the seed itself, so that it does not depend on n.

    The others are hashed: with seed + 1, seed + 2, ... requests with adjacent seeds would share choices.
    """
    if seed is None or sibling == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{sibling}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
