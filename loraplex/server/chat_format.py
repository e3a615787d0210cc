"""Write chat completions as JSON: whole answers and stream chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loraplex.engine.text_engine import TextDelta
from loraplex.server.generation import ChoiceResult, head_bytes
from loraplex.server.logprobs import chat_logprobs
from loraplex.server.responses import ChatAnswer, ChatChoice, ChatCompletion, Usage

_encode = msgspec.json.Encoder().encode


class ChatFormat:
    """The AnswerFormat of /v1/chat/completions.

    Chunks are concatenated from bytes: a token costs only the escaping of its text and a concatenation.
    """

    def __init__(
        self, *, request_id: str, created: int, model: str, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._id, self._created, self._model = request_id, created, model
        self._with_logprobs = with_logprobs
        self._head = head_bytes(
            {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
        )
        # With include_usage every chunk has the field; it is null in all but the last.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        return b"".join([self._chunk(delta) for delta in batch if _says_something(delta)])

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatAnswer(content=result.text),
                    logprobs=chat_logprobs(result.logprobs) if self._with_logprobs else None,
                    finish_reason=result.finish_reason,
                    stop_reason=result.stop,
                )
                for index, result in enumerate(results)
            ],
            usage=usage,
        )

    def _chunk(self, delta: TextDelta) -> bytes:
        role = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            role = b'"role":"assistant",'
        logprobs = _encode(chat_logprobs(delta.logprobs)) if self._with_logprobs else b"null"
        if delta.finish_reason is None:
            end = b',"finish_reason":null}'
        else:
            end = b',"finish_reason":"%b","stop_reason":%b}' % (
                delta.finish_reason.encode(),
                _encode(delta.stop),
            )
        return b'%b{"index":%d,"delta":{%b"content":%b},"logprobs":%b%b%b' % (
            self._head,
            delta.choice,
            role,
            _encode(delta.text),
            logprobs,
            end,
            self._tail,
        )


def _says_something(delta: TextDelta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish_reason is not None)
