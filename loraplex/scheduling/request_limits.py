"""Refuses requests that could never run when they arrive."""

from __future__ import annotations

from loraplex.core.errors import CapacityError, ContextLengthError, InvalidRequestError, UnknownModelError
from loraplex.core.request import EngineRequest
from loraplex.core.words import plural
from loraplex.scheduling.memory import Memory


def check_request(request: EngineRequest, max_model_len: int, memory: Memory) -> None:
    """Raise an error that says what is wrong with the request, if it could never run."""
    num_tokens = request.num_tokens
    if not request.prompt_token_ids:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    max_tokens = request.params.max_tokens
    if max_tokens is not None and len(request.output_token_ids) >= max_tokens:
        raise InvalidRequestError(
            f"the answer so far has all of the {max_tokens} {plural('token', max_tokens)} asked for",
            param="output_token_ids",
        )
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"{_known_tokens(request)}; with room for one more the context holds {max_model_len}",
            param="prompt",
        )
    if request.adapter is not None and request.adapter not in memory.table:
        raise UnknownModelError(f"adapter version {request.adapter} is not registered")
    if num_tokens + 1 > _capacity(request.adapter, memory):
        room = room_in_words(request.adapter, memory)
        raise CapacityError(f"{_known_tokens(request)}, {room}; {memory.advice}")


def _known_tokens(request: EngineRequest) -> str:
    number = request.num_tokens
    what = "the prompt and the answer so far have" if request.output_token_ids else "the prompt has"
    return f"{what} {number} {plural('token', number)}"


def room_in_words(adapter: str | None, memory: Memory) -> str:
    """Return a phrase with the number of tokens that a request on this adapter may have."""
    beside = "" if adapter is None else " beside the request's adapter"
    capacity = _capacity(adapter, memory)
    return f"KV memory holds {capacity} {plural('token', capacity)}{beside}"


def _capacity(adapter: str | None, memory: Memory) -> int:
    return memory.max_tokens(0 if adapter is None else memory.table.num_bytes(adapter))
