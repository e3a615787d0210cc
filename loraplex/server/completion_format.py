"""Write plain completions as JSON: whole answers and stream chunks, preceded by the prompt if it is
echoed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from loraplex.engine.text_engine import LogprobText, TextDelta
from loraplex.server.generation import ChoiceResult, head_bytes
from loraplex.server.generation_responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from loraplex.server.logprobs import completion_logprobs, prompt_logprobs

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class EchoedPrompt:
    """A prompt that the answer repeats. `token_offsets` is filled only if log-probabilities are requested."""

    text: str
    token_offsets: Sequence[int] = ()


_NO_PROMPT: Final = EchoedPrompt(text="")


class CompletionFormat:
    """The AnswerFormat of /v1/completions.

    `echo` holds each prompt if it is to be repeated, else it is None. `prompt_only` drops generated text:
    with echo and max_tokens 0 only the prompt is wanted. `prompt_ids` holds the prompts' tokens if the answer
    is to have token ids. `logprobs_by_id` names tokens by their ids. `num_top`: likeliest tokens of echoed
    ones; `num_prompt_top`: those of `prompt_logprobs`, None without that field.
    """

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        with_logprobs: bool,
        include_usage: bool,
        num_siblings: int,
        echo: Sequence[EchoedPrompt] | None,
        prompt_only: bool,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        logprobs_by_id: bool = False,
        num_top: int | None = None,
        num_prompt_top: int | None = None,
    ) -> None:
        self._id, self._created, self._model = request_id, created, model
        self._with_logprobs = with_logprobs
        self._num_siblings = num_siblings
        self._echo = echo
        self._prompt_only = prompt_only
        self._prompt_ids = prompt_ids
        self._logprobs_by_id = logprobs_by_id
        self._num_top, self._num_prompt_top = num_top, num_prompt_top
        self._head = head_bytes(
            {"id": request_id, "object": "text_completion", "created": created, "model": model}
        )
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        if self._echo is None and not self._with_logprobs and self._prompt_ids is None:
            return b"".join([self._plain_chunk(d) for d in batch if d.text or d.finish_reason is not None])
        return b"".join([self._rich_chunk(delta) for delta in batch])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
        )

    def _choice(self, index: int, result: ChoiceResult) -> CompletionChoice:
        logprobs = None
        if self._with_logprobs:
            echoed = () if self._echo is None else result.prompt_logprobs or ()
            logprobs = self._logprobs(index, echoed, result.logprobs)
        of_prompt: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        if self._num_prompt_top is not None:
            of_prompt = prompt_logprobs(result.prompt_logprobs or (), self._num_prompt_top)
        return CompletionChoice(
            index=index,
            text=self._prompt(index).text + ("" if self._prompt_only else result.text),
            logprobs=logprobs,
            finish_reason="length" if self._prompt_only else result.finish_reason,
            stop_reason=None if self._prompt_only else result.stop,
            prompt_token_ids=msgspec.UNSET if self._prompt_ids is None else self._ids_of_prompt(index),
            token_ids=msgspec.UNSET if self._prompt_ids is None else self._ids_of_answer(result.sampled_ids),
            prompt_logprobs=of_prompt,
        )

    def _ids_of_prompt(self, choice: int) -> list[int]:
        assert self._prompt_ids is not None, "asked for only where the answer has token ids"
        return list(self._prompt_ids[choice // self._num_siblings])

    def _ids_of_answer(self, sampled_ids: Sequence[int]) -> list[int]:
        return [] if self._prompt_only else list(sampled_ids)

    def _prompt(self, choice: int) -> EchoedPrompt:
        return _NO_PROMPT if self._echo is None else self._echo[choice // self._num_siblings]

    def _logprobs(
        self, choice: int, prompt_entries: Sequence[LogprobText], entries: Sequence[LogprobText]
    ) -> CompletionLogprobs:
        prompt = self._prompt(choice)
        offsets = list(prompt.token_offsets) if prompt_entries else []
        if self._prompt_only:
            entries = ()
        offsets += [len(prompt.text) + (entry.offset or 0) for entry in entries]
        shown = [replace(entry, top=entry.top[: self._num_top]) for entry in prompt_entries]
        return completion_logprobs([*shown, *entries], offsets, by_token_id=self._logprobs_by_id)

    def _rich_chunk(self, delta: TextDelta) -> bytes:
        text = "" if self._prompt_only else delta.text
        echoed: Sequence[LogprobText] = ()
        ids = b""
        if self._prompt_ids is not None:
            ids = b',"token_ids":%b' % _encode(self._ids_of_answer(delta.sampled_ids))
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            text = self._prompt(delta.choice).text + text
            echoed = delta.prompt_logprobs or ()
            if self._prompt_ids is not None:
                ids += b',"prompt_token_ids":%b' % _encode(self._ids_of_prompt(delta.choice))
        logprobs, num_entries = b"null", 0
        if self._with_logprobs:
            written = self._logprobs(delta.choice, echoed, delta.logprobs)
            logprobs, num_entries = _encode(written), len(written.tokens)
        if not (text or num_entries or ids or delta.finish_reason is not None):
            return b""
        return self._chunk(delta, text, logprobs, ids)

    def _plain_chunk(self, delta: TextDelta) -> bytes:
        return self._chunk(delta, delta.text, b"null")

    def _chunk(self, delta: TextDelta, text: str, logprobs: bytes, token_ids: bytes = b"") -> bytes:
        end = b',"finish_reason":null}'
        if delta.finish_reason is not None:
            reason = "length" if self._prompt_only else delta.finish_reason
            stop = None if self._prompt_only else delta.stop
            end = b',"finish_reason":"%b","stop_reason":%b}' % (reason.encode(), _encode(stop))
        return b'%b{"index":%d,"text":%b,"logprobs":%b%b%b%b' % (
            self._head,
            delta.choice,
            _encode(text),
            logprobs,
            token_ids,
            end,
            self._tail,
        )
