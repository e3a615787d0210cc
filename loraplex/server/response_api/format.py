"""Write answers of chats as OpenAI's responses: whole ones, and typed events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from loraplex.core.request import FinishReason
from loraplex.engine.text_engine import TextDelta
from loraplex.server.answer_reader import AnswerReader, AnswerReading
from loraplex.server.generation import ChoiceResult
from loraplex.server.generation_responses import Response, Usage
from loraplex.server.response_api.request import ResponsesRequest
from loraplex.server.tool_calls.answer_delta import AnswerDelta, CallDelta

Status = Literal["in_progress", "completed", "incomplete"]
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
_EMPTY: Final[dict[str, Any]] = {"annotations": [], "logprobs": []}


class ResponsesFormat:
    """The AnswerFormat of /v1/responses.

    An answer is a list of items: reasoning, messages and calls, each with parts of its text. `model`: the
    name that was asked for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        body: ResponsesRequest,
        reading: AnswerReading | None,
    ) -> None:
        self._id, self._created, self._model, self._body = request_id, created, model, body
        self._reader = AnswerReader(reading or AnswerReading())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._finish_reason = FinishReason.STOP
        self._num_events = 0

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        events = [] if self._num_events else self._begin()
        for delta in batch:
            is_last = delta.finish_reason is not None
            if delta.finish_reason is not None:
                self._finish_reason = delta.finish_reason
            events += self._add(self._reader.read(delta.text, is_last=is_last))
            if is_last:
                events += self._close()
        return b"".join(events)

    def usage_chunk(self, usage: Usage) -> bytes:
        response = self._response(usage)
        return self._event(f"response.{response.status}", response=response)

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> Response:
        [result] = results
        self._finish_reason = result.finish_reason
        self._add(self._reader.read(result.text, is_last=True))
        self._close()
        return self._response(usage)

    def _begin(self) -> list[bytes]:
        response = self._response(None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def _add(self, read: AnswerDelta) -> list[bytes]:
        events = []
        if read.reasoning:
            events += self._add_text("reasoning", read.reasoning)
        if read.content:
            events += self._add_text("message", read.content)
        for call in read.calls:
            events += self._add_call(call)
        return events

    def _add_text(self, kind: str, text: str) -> list[bytes]:
        events, item = [], self._open
        if item is None or item["type"] != kind:
            events += self._close()
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            if kind == "message":
                part |= _EMPTY
            item = self._new_item(kind, **fields, content=[])
            events.append(self._item_event("response.output_item.added"))
            item["content"].append(part)
            events.append(self._part_event("response.content_part.added", part=part))
        item["content"][0]["text"] += text
        fields = {"logprobs": []} if kind == "message" else {}
        events.append(self._part_event(f"response.{_PARTS[kind]}.delta", delta=text, **fields))
        return events

    def _add_call(self, call: CallDelta) -> list[bytes]:
        events = []
        if call.name is not None:
            events += self._close()
            self._new_item("function_call", call_id=call.call_id, name=call.name, arguments="")
            events.append(self._item_event("response.output_item.added"))
        assert self._open is not None, "a call begins with its name"
        if call.arguments:
            self._open["arguments"] += call.arguments
            events.append(self._of_item("response.function_call_arguments.delta", delta=call.arguments))
        return events

    def _new_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        item = {
            "id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        self._items.append(item)
        self._open = item
        return item

    def _close(self) -> list[bytes]:
        """End the open item."""
        item = self._open
        if item is None:
            return []
        kind, events = item["type"], []
        if kind == "function_call":
            events.append(
                self._of_item(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            )
        else:
            [part] = item["content"]
            fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self._part_event(f"response.{_PARTS[kind]}.done", text=part["text"], **fields))
            events.append(self._part_event("response.content_part.done", part=part))
        item["status"] = "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"
        events.append(self._item_event("response.output_item.done"))
        self._open = None
        return events

    def _item_event(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, item=self._open)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _response(self, usage: Usage | None) -> Response:
        body, is_cut = self._body, self._finish_reason is FinishReason.LENGTH
        status: Status = "in_progress"
        if usage is not None:
            status = "incomplete" if is_cut else "completed"
        return Response(
            id=self._id,
            created_at=self._created,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text={"format": {"type": "text"} if body.text is None else body.text.format or {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            usage=None if usage is None else _usage(usage),
            user=body.user,
        )


def _usage(usage: Usage) -> dict[str, Any]:
    found: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
    if usage.adapter_version is not msgspec.UNSET:
        found["adapter_version"] = usage.adapter_version
    return found
