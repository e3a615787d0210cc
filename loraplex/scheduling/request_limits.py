"""Requests that could never run are refused when they come."""

from __future__ import annotations

from loraplex.core.errors import CapacityError, ContextLengthError, InvalidRequestError, UnknownModelError
from loraplex.core.request import EngineRequest
from loraplex.core.words import plural
from loraplex.scheduling.memory import Memory


def check_request(request: EngineRequest, max_model_len: int, memory: Memory) -> None:
    """Raises what is wrong with it."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    if num_prompt >= max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} {plural('token', num_prompt)}; with room for one more the context "
            f"holds {max_model_len}",
            param="prompt",
        )
    if request.adapter is not None and request.adapter not in memory.residency:
        raise UnknownModelError(f"adapter version {request.adapter} is not registered")
    if num_prompt + 1 > _capacity(request.adapter, memory):
        room = room_in_words(request.adapter, memory)
        raise CapacityError(
            f"the prompt has {num_prompt} {plural('token', num_prompt)}, {room}; {memory.advice}"
        )


def room_in_words(adapter: str | None, memory: Memory) -> str:
    """How much a request on this adapter may have."""
    beside = "" if adapter is None else " beside the request's adapter"
    capacity = _capacity(adapter, memory)
    return f"KV memory holds {capacity} {plural('token', capacity)}{beside}"


def _capacity(adapter: str | None, memory: Memory) -> int:
    return memory.max_tokens(0 if adapter is None else memory.residency.num_bytes(adapter))
