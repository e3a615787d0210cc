"""The request bodies that clients may send: one struct each, which is also its schema in the OpenAPI
document.

Decoding is strict: wrong types, NaN, numbers out of range and unknown fields are refused. There are three
kinds of fields: those with an effect; those without effect here, accepted so that common clients work; and
those that would change the answer but are not supported, accepted only with a neutral value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from loraplex.core.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
)
from loraplex.server.chat_messages import ChatMessage
from loraplex.server.tool_calls.definitions import ToolChoice, Tools

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
MAX_TOKENS_NAMED: Final = 1024
"""Most tokens that a request may name by id in one of its options."""
MAX_SALT_CHARS: Final = 256
MAX_TEMPLATE_CHARS: Final = 2**16
MAX_PLAN_NAME_CHARS: Final = 200
MAX_LISTED_CHOICES: Final = 1024
"""Most texts of `guided_choice`."""
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
StopString = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: none is added
    continuous_usage_stats: Literal[False] | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` has no effect: a schema is always followed."""

    name: str | None = None
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_LISTED_CHOICES)]


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form. A schema may be given as text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and plain completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    # Keys are checked to be token ids after their number was: checking each against a pattern would take
    # long.
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(max_length=10)], Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=MAX_TOKENS_NAMED),
        ]
        | None
    ) = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_NAMED)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    # What the answer must look like: one of these.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # vLLM's: texts that the answer may not have; the prompt's last tokens to keep; lower ones come first.
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    # LoRAX's: instead of `model`, which is then the base model or empty.
    adapter_id: Annotated[str, Meta(max_length=1024)] | None = None
    # Without effect here, except that `user` or `safety_identifier` chooses the version where a name has a
    # canary.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    # Accepted only with the value that holds anyway.
    spaces_between_special_tokens: bool | None = None
    use_beam_search: Literal[False] | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Only where the server was started so.
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Whether reasoning is told from the answer, as SGLang has it, and then shown, as vLLM has it.
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    # Without effect here.
    prediction: dict[str, Any] | None = None
    # Not supported.
    functions: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None
    moderation: None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`prompt` is a text, several texts, token ids, or several lists of token ids.

    `output_token_ids`: the beginning of an answer generated elsewhere, for one prompt of token ids. The
    answer is the rest of it, as it would have been; `max_tokens` and `min_tokens` count the whole.
    """

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(
            extra_json_schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    },
                ]
            }
        ),
    ]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    output_token_ids: list[TokenId] | None = None
    # Not supported.
    suffix: Literal[""] | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False
    # Between 0 and 1: the share of the requests that the new version answers while the served one keeps the
    # rest.
    canary_share: float | None = None


class AdapterNameRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str


class RollBackAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`version`: the beginning of a previous version's hash; by default the last previous version."""

    lora_name: str
    version: str | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's number for the adapter, which is ignored


class ReplicaRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    replica: int


class LeaveRequest(ReplicaRequest, kw_only=True, forbid_unknown_fields=True):
    """`move`: other replicas continue its requests; otherwise it finishes them itself."""

    move: bool = False


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`replicas`: the wanted number of replicas. `move`: those that stay continue the requests of those that
    leave."""

    replicas: int
    move: bool = False


class GivenAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One adapter of a placement. `rank`: refused if the adapter has another one. `shares`: of its requests,
    for each of its replicas; equal ones if left out."""

    lora_name: str
    rank: Count | None = None
    replicas: list[int]
    shares: list[Annotated[float, Meta(ge=1e-6, le=1.0)]] | None = None


class PlacementRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`replicas`: the replicas that the placement was made for, which must be all of the fleet. `dry_run`:
    check it, and change nothing. `plan`: what people call it, for `fleet status` and the log."""

    replicas: list[int]
    adapters: list[GivenAdapter]
    dry_run: bool = False
    plan: Annotated[str, Meta(max_length=MAX_PLAN_NAME_CHARS, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] | None = (
        None
    )


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages` is given. By default special tokens are added to a prompt, not to
    messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[TokenId]


_LEAVE_OUT: Final = "leave it out"
_TEXT_ONLY: Final = "send text alone"

NOT_SUPPORTED: Final[Mapping[str, str]] = {
    # Fields of OpenAI's requests.
    "functions": "send tools",
    "function_call": "send tool_choice",
    "modalities": 'leave it out, or send ["text"]',
    "audio": _LEAVE_OUT,
    "reasoning_effort": _LEAVE_OUT,
    "verbosity": _LEAVE_OUT,
    "web_search_options": _LEAVE_OUT,
    "moderation": _LEAVE_OUT,
    "suffix": _LEAVE_OUT,
    "previous_response_id": "responses are not kept; send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "background": "leave it out, or make a batch of it (/v1/batches)",
    "max_tool_calls": _LEAVE_OUT,
    "effort": _LEAVE_OUT,
    "truncation": "leave it out, or send disabled",
    "include": "leave it out",
    # Fields of OpenAI's messages.
    "refusal": _LEAVE_OUT,
    "annotations": _LEAVE_OUT,
    "image_url": _TEXT_ONLY,
    "input_audio": _TEXT_ONLY,
    "file": _TEXT_ONLY,
    # Fields of vLLM's requests.
    "use_beam_search": "leave it out, or send false",
    "continuous_usage_stats": "leave it out, or send false",
}
"""Fields that clients know from elsewhere, with advice on their refusal here. Whatever is wrong with one of
them, the error says that it is not supported: that helps more than the expected type."""

SUPPORTED_VALUES: Final[Mapping[str, str]] = {
    "response_format.type": "send text, json_object or json_schema",
    "text.format.type": "send text, json_object or json_schema",
    "input.role": "send system, developer, user or assistant",
    "input.content.type": _TEXT_ONLY,
    "top_logprobs": _LEAVE_OUT,
    "endpoint": "send /v1/chat/completions, /v1/completions or /v1/responses",
    "messages.role": "send system, developer, user, assistant or tool",
    "messages.content.type": _TEXT_ONLY,
}
"""Fields that are supported with some values only, with advice on these. Others with a wrong value are told
what is allowed."""


class AdapterQuery(msgspec.Struct, kw_only=True):
    """The query of a list of adapters. `contains`: part of the names wanted, in any case; `order`: the
    highest first, except for names. Without a `limit` all are listed."""

    contains: str = ""
    tier: Literal["device", "loading", "host", "disk"] | None = None
    order: Literal["name", "requests", "tokens", "in_flight", "loads", "rank"] = "name"
    offset: Annotated[int, Meta(ge=0)] = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None


class OverviewQuery(msgspec.Struct, kw_only=True):
    """The query of an overview: the `at_s` of the last sample and change that the client has, and the `etag`
    of its map."""

    samples_after: Annotated[float, Meta(ge=0)] = 0.0
    changes_after: Annotated[float, Meta(ge=0)] = 0.0
    map: str = ""
