"""Encodes prompts for a server, with bounded work and nothing on the event loop that grows with the request.

Short prompts are encoded inline, which takes less than a millisecond. Longer ones go to a few threads; the
tokenizer computes there without the GIL, so that other streams go on. Large ones, which take from tens of
milliseconds to seconds, have a thread of their own: no other prompt waits for them.

Prompts that cannot fit the context are refused without encoding all of it:

    more than MAX_MESSAGES messages                     by counting
    a first part that has more tokens than the context  by encoding that part
    longer than the context times the longest token     by its length
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from loraplex.core.errors import ContextLengthError, InvalidRequestError
from loraplex.engine.heap import release_free_memory
from loraplex.engine.request_checks import check_vocabulary
from loraplex.engine.tokenizer import Message, Tokenizer
from loraplex.engine.tool_traits import ToolTraits

T = TypeVar("T")

MAX_MESSAGES: Final = 2048
"""Most messages of a conversation, and most parts of their contents: rendering costs about 10 us for each."""
MAX_TEXT_CHARS: Final = 1_000_000
"""Most characters of a /tokenize request. Prompts are bounded by the context."""
MAX_DECODED_TOKENS: Final = 2**18
"""Most tokens of a /detokenize request."""

_NUM_THREADS: Final = 2
"""Threads for texts that are not large; one more is for large ones."""
_NICENESS: Final = 10
_INLINE_CHARS: Final = 1024
_INLINE_MESSAGES: Final = 16
_INLINE_TOKENS: Final = 4096
_LARGE_CHARS: Final = 2**16
_LARGE_TOKENS: Final = 2**14
"""Larger work goes to a thread of its own and returns freed memory to the system afterwards."""
_PROBE_CHARS_PER_TOKEN: Final = 8
"""Text has fewer characters per token than this, except for runs of spaces and the like."""
_PROBE_SLACK_TOKENS: Final = 64
"""Cutting a text changes the tokens next to the cut, never as many as this."""
_NORMALIZED_FACTOR: Final = 4
"""Factor by which Unicode normalization shortens a text at most."""


class PromptEncoder:
    """Encodes and decodes for one event loop. `max_model_len`: the context length in tokens."""

    def __init__(self, tokenizer: Tokenizer, *, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._tool_traits: ToolTraits | None = None
        self._threads = _threads(_NUM_THREADS, "text")
        self._large_text_thread = _threads(1, "large-text")

    async def encode_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, will_be_cut: bool = False
    ) -> list[list[int]]:
        """Return the tokens of each prompt. Raise ContextLengthError for one that is certain not to fit the
        context, unless it will be cut."""

        def encode() -> list[list[int]]:
            for text in texts:
                self._refuse_overlong(text, will_be_cut=will_be_cut)
            return self._tokenizer.encode_many(texts, add_special_tokens=add_special_tokens)

        return await self._run_on_chars(encode, sum(map(len, texts)))

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        will_be_cut: bool = False,
    ) -> list[int]:
        """Render and encode a conversation that must fit the context, unless it will be cut."""

        text = await self._render(messages, add_generation_prompt, template_options, tools)
        return await self.encode_rendered(text, will_be_cut=will_be_cut)

    async def encode_rendered(self, text: str, *, will_be_cut: bool = False) -> list[int]:
        """Encode a conversation that was rendered already; see `encode_chat`."""

        def encode() -> list[int]:
            self._refuse_overlong(text, param="messages", will_be_cut=will_be_cut)
            return self._tokenizer.encode(text, add_special_tokens=False)

        return await self._run_on_chars(encode, len(text))

    async def tool_traits(self) -> ToolTraits:
        """Return the traits of the model's chat template with tools, which are remembered."""
        if self._tool_traits is None:
            self._tool_traits = await self._run(
                self._tokenizer.find_tool_traits, in_thread=True, is_large=False
            )
        return self._tool_traits

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, whether or not it fits the context."""
        _refuse_many_chars(text, param="prompt")
        return await self._run_on_chars(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the tokens of a conversation, whether or not it fits the context."""

        text = await self._render(messages, add_generation_prompt, template_options, tools)
        _refuse_many_chars(text, param="messages")
        return await self._run_on_chars(
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text)
        )

    async def detokenize(self, token_ids: Sequence[int], *, vocab_size: int) -> str:
        """Return the text of tokens. Refuse more than MAX_DECODED_TOKENS, and ids outside the vocabulary."""
        if len(token_ids) > MAX_DECODED_TOKENS:
            raise InvalidRequestError(
                f"{len(token_ids):,} tokens are more than the {MAX_DECODED_TOKENS:,} that are decoded at a "
                "time; send them in several requests",
                param="tokens",
            )

        def decode() -> str:
            for start in range(0, len(token_ids), _INLINE_TOKENS):  # in parts, so that other threads can run
                part = token_ids[start : start + _INLINE_TOKENS]
                check_vocabulary(part, vocab_size=vocab_size, param="tokens")
            return self._tokenizer.decode(token_ids)

        return await self.call(decode, num_tokens=len(token_ids))

    async def call(self, work: Callable[[], T], *, num_tokens: int) -> T:
        """Run other work on this many tokens, in a thread if there are many."""
        return await self._run(
            work, in_thread=num_tokens > _INLINE_TOKENS, is_large=num_tokens > _LARGE_TOKENS
        )

    def close(self) -> None:
        """End the threads without waiting for their current work."""
        for threads in (self._threads, self._large_text_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        template_options: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> str:
        """Return the text of a conversation; its length is not known before."""

        def render() -> str:
            return self._tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                template_options=template_options,
                tools=tools,
            )

        return await self._run_on_chars(
            render, _num_chars(messages), in_thread=bool(tools) or _is_long(messages, template_options)
        )

    async def _run_on_chars(self, work: Callable[[], T], num_chars: int, *, in_thread: bool = False) -> T:
        return await self._run(
            work, in_thread=in_thread or num_chars > _INLINE_CHARS, is_large=num_chars > _LARGE_CHARS
        )

    async def _run(self, work: Callable[[], T], *, in_thread: bool, is_large: bool) -> T:
        if not in_thread:
            return work()

        def work_and_clean_up() -> T:
            try:
                return work()
            finally:
                release_free_memory()

        loop = asyncio.get_running_loop()
        if is_large:
            return await loop.run_in_executor(self._large_text_thread, work_and_clean_up)
        return await loop.run_in_executor(self._threads, work)

    def _refuse_overlong(self, text: str, *, param: str = "prompt", will_be_cut: bool = False) -> None:
        """Raise ContextLengthError if a first part of the text, or its length, shows that it does not fit."""
        if will_be_cut:
            _refuse_many_chars(text, param=param)
            return
        limit = self._max_model_len
        num_probed = _PROBE_CHARS_PER_TOKEN * limit
        if len(text) <= num_probed:
            return
        longest = self._tokenizer.longest_token_bytes
        num_tokens = len(self._tokenizer.encode(text[:num_probed], add_special_tokens=False))
        too_many = num_tokens > limit + _PROBE_SLACK_TOKENS
        too_long = longest is not None and len(text) > _NORMALIZED_FACTOR * longest * limit
        if too_many or too_long:
            raise ContextLengthError(
                f"the prompt has {len(text):,} characters, which are more tokens than the context length of "
                f"{limit} tokens; shorten the prompt",
                param=param,
            )


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_step_back_behind_engines)


def _step_back_behind_engines() -> None:
    """Lower the priority of this thread: where cores are few, an engine's steps come before long prompts."""
    if sys.platform == "linux":  # elsewhere priorities apply to whole processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def refuse_many_messages(num_messages: int, num_parts: int) -> None:
    """Refuse conversations with so many messages that rendering alone would take long."""
    if max(num_messages, num_parts) > MAX_MESSAGES:
        what = f"{num_messages:,} messages" if num_messages > MAX_MESSAGES else f"{num_parts:,} content parts"
        raise InvalidRequestError(
            f"the conversation has {what}, more than the {MAX_MESSAGES:,} that a request may have; "
            "shorten it or join messages",
            param="messages",
        )


def _refuse_many_chars(text: str, *, param: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"the text has {len(text):,} characters, more than the {MAX_TEXT_CHARS:,} that are tokenized at "
            "a time; send it in several requests",
            param=param,
        )


def _is_long(messages: Sequence[Message], template_options: Mapping[str, Any] | None) -> bool:
    """Return whether rendering may take long whatever the length of the texts: many messages, nested tool
    calls, or options that the template may print."""
    return (
        len(messages) > _INLINE_MESSAGES
        or bool(template_options)
        or any("tool_calls" in message for message in messages)
    )


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
