"""The answers of routes that generate: chats, completions and OpenAI's responses.

Stream chunks are written by hand in `chat_format.py` and `completion_format.py`, for speed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`adapter_version`: the content hash of the adapter that answered; absent for the base model.
    `reproducible`: false if the request had a seed and its answer was continued elsewhere with different
    random draws; otherwise absent."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    adapter_version: str | msgspec.UnsetType = msgspec.UNSET
    reproducible: bool | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null only beside calls. `tool_calls` and `reasoning_content` are present where there are
    any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """`rank`: 1 for the likeliest token; null for one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt, each with tokens by id: its own and the likeliest; null for the first."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`stop_reason` is the stop string or stop token that ended the choice, if one did. `token_ids` is there
    with `return_token_ids`."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of /v1/responses. `output`: reasoning, messages and calls. Nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: dict[str, Any] | None
    user: str | None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry for each token; null for the first token of an echoed prompt.

    With `return_tokens_as_token_ids` tokens are given by id (`token_id:42`) instead of text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choices are numbered prompt by prompt: n for the first prompt, then n for the next.

    `prompt_token_ids` and `token_ids` are present with `return_token_ids`; `token_ids` includes the stop
    token, if any.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
