"""Plain completions as JSON: whole answers and stream chunks, with the prompt in front when it is echoed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.engine.text_engine import LogprobText, TextDelta
from loraplex.server.generation import ChoiceResult, head_bytes
from loraplex.server.logprobs import CompletionLogprobWriter
from loraplex.server.responses import Completion, CompletionChoice, Usage

_encode = msgspec.json.Encoder().encode


class CompletionFormat:
    """The AnswerFormat of /v1/completions.

    `echo` holds the text of each prompt when it is to be repeated, else it is None. `prompt_only` drops
    what was generated: with echo and max_tokens 0 only the prompt is wanted.
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
        echo: Sequence[str] | None,
        prompt_only: bool,
    ) -> None:
        self._id, self._created, self._model = request_id, created, model
        self._with_logprobs = with_logprobs
        self._num_siblings = num_siblings
        self._echo = echo
        self._prompt_only = prompt_only
        self._head = head_bytes(
            {"id": request_id, "object": "text_completion", "created": created, "model": model}
        )
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._writers: dict[int, CompletionLogprobWriter] = {}
        self._begun: set[int] = set()

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        if self._echo is None and not self._with_logprobs:
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
        entries = (*(result.prompt_logprobs or ()), *([] if self._prompt_only else result.logprobs))
        return CompletionChoice(
            index=index,
            text=self._prompt_text(index) + ("" if self._prompt_only else result.text),
            logprobs=CompletionLogprobWriter().write(entries) if self._with_logprobs else None,
            finish_reason="length" if self._prompt_only else result.finish_reason,
            stop_reason=None if self._prompt_only else result.stop,
        )

    def _prompt_text(self, choice: int) -> str:
        return "" if self._echo is None else self._echo[choice // self._num_siblings]

    def _rich_chunk(self, delta: TextDelta) -> bytes:
        text = "" if self._prompt_only else delta.text
        entries: tuple[LogprobText, ...] = () if self._prompt_only else delta.logprobs
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            text = self._prompt_text(delta.choice) + text
            entries = (*(delta.prompt_logprobs or ()), *entries)
        logprobs = b"null"
        if self._with_logprobs:
            writer = self._writers.setdefault(delta.choice, CompletionLogprobWriter())
            logprobs = _encode(writer.write(entries))
        if not (text or entries or delta.finish_reason is not None):
            return b""
        return self._chunk(delta, text, logprobs)

    def _plain_chunk(self, delta: TextDelta) -> bytes:
        return self._chunk(delta, delta.text, b"null")

    def _chunk(self, delta: TextDelta, text: str, logprobs: bytes) -> bytes:
        end = b',"finish_reason":null}'
        if delta.finish_reason is not None:
            reason = "length" if self._prompt_only else delta.finish_reason
            stop = None if self._prompt_only else delta.stop
            end = b',"finish_reason":"%b","stop_reason":%b}' % (reason.encode(), _encode(stop))
        return b'%b{"index":%d,"text":%b,"logprobs":%b%b%b' % (
            self._head,
            delta.choice,
            _encode(text),
            logprobs,
            end,
            self._tail,
        )
