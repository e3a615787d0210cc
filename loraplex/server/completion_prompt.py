"""The prompts of /v1/completions as checked tokens, and the length that a prompt is cut to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex.core.errors import InvalidRequestError
from loraplex.core.sampling import SamplingParams
from loraplex.core.words import plural
from loraplex.engine.prompt_offsets import prompt_offsets
from loraplex.engine.request_checks import check_vocabulary
from loraplex.engine.text_engine import CheckedPrompts, TextEngine
from loraplex.server.completion_format import EchoedPrompt
from loraplex.server.requests import CompletionRequest, SamplingFields

# Prompts × n of one request; each becomes a separate engine request.
MAX_CHOICES_PER_REQUEST: Final = 2048


def count_choices(body: CompletionRequest, params: SamplingParams) -> int:
    """Return prompts × n, counted without iterating over the prompts' tokens. Raises InvalidRequestError if
    that is too many."""
    prompt = body.prompt
    num_prompts = 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)
    if num_prompts * params.n > MAX_CHOICES_PER_REQUEST:
        raise InvalidRequestError(
            f"{num_prompts} {plural('prompt', num_prompts)} with n = {params.n} make more than "
            f"{MAX_CHOICES_PER_REQUEST} choices; send several requests",
            param="prompt",
        )
    return num_prompts * params.n


async def encode_prompts(
    text_engine: TextEngine, body: CompletionRequest, params: SamplingParams
) -> tuple[CheckedPrompts, list[EchoedPrompt] | None]:
    """Return the prompts as checked tokens, and the text that `echo` repeats."""
    if body.output_token_ids:
        _check_begun(text_engine, body, params)
    prompts = [
        cut_prompt(each, body, params, text_engine) for each in await _prompts(text_engine, body, params)
    ]
    await text_engine.check_structure(params)
    checked = text_engine.check(prompts, params)
    return checked, await _echoed(text_engine, body, prompts) if body.echo else None


def _check_begun(text_engine: TextEngine, body: CompletionRequest, params: SamplingParams) -> None:
    """Refuse an answer begun elsewhere if it cannot be continued here."""
    param = "output_token_ids"
    assert body.output_token_ids
    if isinstance(body.prompt, str) or not (body.prompt and isinstance(body.prompt[0], int)):
        raise InvalidRequestError(
            "output_token_ids needs a prompt of token ids: a text may be other tokens here", param=param
        )
    for name, is_asked in (("n", params.n > 1), ("stop", bool(params.stop)), ("echo", bool(body.echo))):
        if is_asked:
            raise InvalidRequestError(f"output_token_ids goes without {name}; leave it out", param=param)
    if params.max_tokens is not None and len(body.output_token_ids) >= params.max_tokens:
        raise InvalidRequestError(
            f"output_token_ids has {len(body.output_token_ids)} tokens; max_tokens, which counts them as "
            f"well, is {params.max_tokens}",
            param=param,
        )
    check_vocabulary(body.output_token_ids, vocab_size=text_engine.vocab_size, param=param)


async def _prompts(
    text_engine: TextEngine, body: CompletionRequest, params: SamplingParams
) -> list[list[int]]:
    """Return the four forms of `prompt` as lists of token ids."""
    encoder, special = text_engine.prompts, body.add_special_tokens is not False
    will_be_cut = body.truncate_prompt_tokens is not None
    if isinstance(body.prompt, str):
        _refuse_empty([body.prompt])
        return await encoder.encode_texts([body.prompt], add_special_tokens=special, will_be_cut=will_be_cut)
    items = body.prompt
    if not items:
        raise InvalidRequestError("prompt is an empty list", param="prompt")
    if isinstance(items[0], int) and not will_be_cut:  # one prompt: its length is checked before its ids
        text_engine.check_length(len(items), params)
    if all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    if all(isinstance(item, str) for item in items):
        texts = [item for item in items if isinstance(item, str)]
        _refuse_empty(texts)
        return await encoder.encode_texts(texts, add_special_tokens=special, will_be_cut=will_be_cut)
    if all(isinstance(item, list) for item in items):
        return [item for item in items if isinstance(item, list)]
    raise InvalidRequestError(
        "prompt must be a text, a list of texts, a list of token ids or a list of such lists, not a mixture",
        param="prompt",
    )


def _refuse_empty(texts: Sequence[str]) -> None:
    """Refuse empty texts. The text itself is checked: many tokenizers turn nothing into a beginning-of-text
    token."""
    if "" in texts:
        raise InvalidRequestError("prompt is empty; give at least one character", param="prompt")


async def _echoed(
    text_engine: TextEngine, body: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> list[EchoedPrompt]:
    """Return the prompts that `echo` repeats: the texts as they were sent, or the texts of the tokens."""
    tokenizer, given = text_engine.tokenizer, body.prompt

    def echo() -> list[EchoedPrompt]:
        if body.truncate_prompt_tokens is not None:
            texts = [tokenizer.decode(prompt) for prompt in prompts]
        elif isinstance(given, str):
            texts = [given]
        elif isinstance(given[0], str):
            texts = [item for item in given if isinstance(item, str)]
        else:
            texts = [tokenizer.decode(prompt) for prompt in prompts]
        return [
            EchoedPrompt(
                text=text,
                token_offsets=() if body.logprobs is None else prompt_offsets(tokenizer.pieces, prompt, text),
            )
            for text, prompt in zip(texts, prompts, strict=True)
        ]

    return await text_engine.prompts.call(echo, num_tokens=sum(map(len, prompts)))


def cut_prompt(
    prompt: list[int], body: SamplingFields, params: SamplingParams, text: TextEngine
) -> list[int]:
    """Return the last tokens of a prompt, as many as the request wants of it; with -1, as fit the context
    beside its answer."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )
    return prompt[-max(text.max_model_len - (params.max_tokens or 1), 1) if limit < 0 else -limit :]
