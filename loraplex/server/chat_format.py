"""Write chat completions as JSON: whole answers and stream chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.core.request import FinishReason
from loraplex.engine.text_engine import TextDelta
from loraplex.server.answer_reader import AnswerReader, AnswerReading
from loraplex.server.generation import ChoiceResult, head_bytes
from loraplex.server.generation_responses import (
    AnsweredCall,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatCompletion,
    Usage,
)
from loraplex.server.logprobs import chat_logprobs, prompt_logprobs
from loraplex.server.tool_calls.answer_delta import AnswerDelta

_encode = msgspec.json.Encoder().encode


class ChatFormat:
    """The AnswerFormat of /v1/chat/completions.

    Chunks are concatenated from bytes: a token costs only the escaping of its text and a concatenation.
    `reading`: what is looked for in the text; None if it is the content. `prompt_ids`: the prompt's tokens if
    the answer is to have token ids. `num_prompt_top`: likeliest tokens of `prompt_logprobs`, None without
    that field.
    """

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        with_logprobs: bool,
        include_usage: bool,
        reading: AnswerReading | None = None,
        prompt_ids: Sequence[int] | None = None,
        num_prompt_top: int | None = None,
    ) -> None:
        self._id, self._created, self._model = request_id, created, model
        self._with_logprobs = with_logprobs
        self._head = head_bytes(
            {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
        )
        # With include_usage every chunk has the field; it is null in all but the last.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._begun: set[int] = set()
        self._reading = reading
        self._prompt_ids = prompt_ids
        self._num_prompt_top = num_prompt_top
        self._readers: dict[int, AnswerReader] = {}

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        with_ids = self._prompt_ids is not None
        return b"".join([self._chunk(delta) for delta in batch if with_ids or _says_something(delta)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(index, result) for index, result in enumerate(results)],
            usage=usage,
            prompt_token_ids=msgspec.UNSET if self._prompt_ids is None else list(self._prompt_ids),
            prompt_logprobs=msgspec.UNSET
            if self._num_prompt_top is None
            else prompt_logprobs(results[0].prompt_logprobs or (), self._num_prompt_top),
        )

    def _choice(self, index: int, result: ChoiceResult) -> ChatChoice:
        message, finish_reason = ChatAnswer(content=result.text), str(result.finish_reason)
        if self._reading is not None:
            reader = AnswerReader(self._reading)
            message = _message(reader.read(result.text, is_last=True), has_calls=reader.has_calls)
            finish_reason = _finish_reason(result.finish_reason, reader)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(result.logprobs) if self._with_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=result.stop,
            token_ids=msgspec.UNSET if self._prompt_ids is None else result.sampled_ids,
        )

    def _chunk(self, delta: TextDelta) -> bytes:
        if self._reading is not None:
            return self._read_chunk(delta, self._reading)
        reason = None if delta.finish_reason is None else str(delta.finish_reason)
        return self._joined(delta, b'"content":%b' % _encode(delta.text), reason)

    def _read_chunk(self, delta: TextDelta, reading: AnswerReading) -> bytes:
        """Return the event for what is certain after the delta; nothing if that is nothing."""
        reader = self._readers.get(delta.choice)
        if reader is None:
            reader = self._readers[delta.choice] = AnswerReader(reading)
        read = reader.read(delta.text, is_last=delta.finish_reason is not None)
        fields = _delta_fields(read)
        is_first = delta.choice not in self._begun
        says_more = delta.logprobs or delta.finish_reason is not None or self._prompt_ids is not None
        if not (fields or is_first or says_more):
            return b""
        reason = None if delta.finish_reason is None else _finish_reason(delta.finish_reason, reader)
        return self._joined(delta, b",".join(fields), reason)

    def _joined(self, delta: TextDelta, fields: bytes, finish_reason: str | None) -> bytes:
        tail = self._tail
        ids = b""
        if self._prompt_ids is not None:
            ids = b',"token_ids":%b' % _encode(delta.sampled_ids)
            if not self._begun:
                tail = b'],"prompt_token_ids":%b%b' % (_encode(self._prompt_ids), tail.removeprefix(b"]"))
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            fields = b'"role":"assistant"' + (b"," + fields if fields else b"")
        logprobs = _encode(chat_logprobs(delta.logprobs)) if self._with_logprobs else b"null"
        if finish_reason is None:
            end = b',"finish_reason":null}'
        else:
            end = b',"finish_reason":"%b","stop_reason":%b}' % (finish_reason.encode(), _encode(delta.stop))
        return b'%b{"index":%d,"delta":{%b},"logprobs":%b%b%b%b' % (
            self._head,
            delta.choice,
            fields,
            logprobs,
            ids,
            end,
            tail,
        )


def _finish_reason(reason: FinishReason, reader: AnswerReader) -> str:
    return "tool_calls" if reason is FinishReason.STOP and reader.ends_in_call else str(reason)


def _message(read: AnswerDelta, *, has_calls: bool) -> ChatAnswer:
    calls = [
        AnsweredCall(
            id=call.call_id or "", function=CalledFunction(name=call.name or "", arguments=call.arguments)
        )
        for call in read.calls
    ]
    return ChatAnswer(
        content=None if has_calls and not read.content else read.content,
        tool_calls=calls or msgspec.UNSET,
        reasoning_content=read.reasoning or msgspec.UNSET,
    )


def _delta_fields(read: AnswerDelta) -> list[bytes]:
    fields = []
    if read.reasoning:
        fields.append(b'"reasoning_content":%b' % _encode(read.reasoning))
    if read.content:
        fields.append(b'"content":%b' % _encode(read.content))
    if read.calls:
        calls = []
        for call in read.calls:
            function = {"arguments": call.arguments}
            if call.name is None:
                calls.append({"index": call.index, "function": function})
            else:
                named = {"name": call.name, **function}
                calls.append({"index": call.index, "id": call.call_id, "type": "function", "function": named})
        fields.append(b'"tool_calls":%b' % _encode(calls))
    return fields


def _says_something(delta: TextDelta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish_reason is not None)
