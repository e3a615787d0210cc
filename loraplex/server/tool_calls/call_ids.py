"""Ids of calls. Mistral's templates accept nine letters and digits only."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loraplex.server.tool_calls.formats import ToolFormat

_MISTRAL_CHARS: Final = 9
_MISTRAL_ID: Final = re.compile(f"[A-Za-z0-9]{{{_MISTRAL_CHARS}}}")


def new_call_id(tool_format: ToolFormat) -> str:
    name = uuid.uuid4().hex
    return name[:_MISTRAL_CHARS] if tool_format is ToolFormat.MISTRAL else f"call_{name[:24]}"


def with_accepted_ids(
    messages: Sequence[Mapping[str, Any]], tool_format: ToolFormat | None
) -> Sequence[Mapping[str, Any]]:
    """Return messages of a history with ids that templates of this format accept: conversations may have
    begun elsewhere. Equal ids stay equal."""
    if tool_format is not ToolFormat.MISTRAL:
        return messages
    return [_with_accepted_ids(message) for message in messages]


def _with_accepted_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed: dict[str, Any] = {}
    if (call_id := message.get("tool_call_id")) is not None:
        changed["tool_call_id"] = _accepted(call_id)
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _accepted(call.get("id", ""))} for call in message["tool_calls"]
        ]
    return {**message, **changed} if changed else message


def _accepted(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:_MISTRAL_CHARS]
