"""Prompts become tokens off the event loop, and what cannot fit is refused without being encoded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import hf_tokenizer

from loraplex.core.errors import ContextLengthError, InvalidRequestError
from loraplex.engine.prompt_encoder import (
    MAX_DECODED_TOKENS,
    MAX_MESSAGES,
    MAX_TEXT_CHARS,
    PromptEncoder,
    refuse_many_messages,
)
from loraplex.engine.tokenizer import Message, Tokenizer
from loraplex.engine.tool_traits import ToolTraits

CONTEXT = 64
GATED_CHARS = 100_000


class WatchedTokenizer(Tokenizer):
    """Remembers what was rendered, encoded and decoded, and in which threads. Texts of `GATED_CHARS` or more
    wait for `gate`, if there is one."""

    def __init__(self) -> None:
        super().__init__(hf_tokenizer())
        self.encoded_chars: list[int] = []
        self.threads: set[threading.Thread] = set()
        self.gate: threading.Event | None = None

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        self.threads.add(threading.current_thread())
        return super().render_chat(messages, **options)

    def find_tool_traits(self) -> ToolTraits:
        self.threads.add(threading.current_thread())
        return super().find_tool_traits()

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        self.threads.add(threading.current_thread())
        self.encoded_chars += map(len, texts)
        if self.gate is not None and max(map(len, texts)) >= GATED_CHARS:
            assert self.gate.wait(60)
        return super().encode_many(texts, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.threads.add(threading.current_thread())
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_short_texts_are_encoded_in_place_and_long_ones_in_a_thread() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=100_000)
    plain = Tokenizer(hf_tokenizer())
    for text, in_place in (("short", True), ("word " * 2000, False)):
        tokenizer.threads.clear()
        assert run(encoder.encode_texts([text])) == [plain.encode(text)]
        assert run(encoder.tokenize(text)) == plain.encode(text)
        assert (tokenizer.threads == {threading.main_thread()}) is in_place


def test_many_short_texts_count_together() -> None:
    tokenizer = WatchedTokenizer()
    run(PromptEncoder(tokenizer, max_model_len=CONTEXT).encode_texts(["x"] * 2000))
    assert threading.main_thread() not in tokenizer.threads


def test_chats_are_rendered_and_encoded_alike_wherever_that_happens() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=100_000)
    for content, count in (("hi", 1), ("long " * 2000, 1), ("", 100)):
        messages = [{"role": "user", "content": content}] * count
        expected = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        tokenizer.threads.clear()
        assert run(encoder.encode_chat(messages)) == expected
        assert run(encoder.tokenize_chat(messages)) == expected
        assert (tokenizer.threads == {threading.main_thread()}) is (len(content) < 10 and count == 1)


def test_options_of_a_template_are_rendered_in_a_thread_as_they_may_be_long() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    run(encoder.encode_chat([{"role": "user", "content": "hi"}], template_options={"shout": True}))
    assert tokenizer.threads - {threading.main_thread()}


def test_a_text_does_not_wait_for_large_ones() -> None:
    tokenizer = WatchedTokenizer()
    tokenizer.gate = threading.Event()
    encoder = PromptEncoder(tokenizer, max_model_len=100_000)
    large, small = "x" * GATED_CHARS, "word " * 2000
    messages = [{"role": "user", "content": large}]

    async def go() -> None:
        encodings = [
            asyncio.create_task(encoding)
            for encoding in (
                encoder.tokenize(large),
                encoder.encode_texts([large]),
                encoder.encode_chat(messages),
                encoder.tokenize_chat(messages),
            )
        ]
        try:
            async with asyncio.timeout(60):
                assert await encoder.encode_texts([small]) == [tokenizer.encode(small)]
                assert await encoder.tokenize(small)
                assert await encoder.encode_chat([{"role": "user", "content": small}])
            assert not any(encoding.done() for encoding in encodings)
        finally:
            tokenizer.gate.set()
        assert all(await asyncio.gather(*encodings))

    run(go())


def test_what_a_template_does_with_tools_is_found_once_in_a_thread() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    assert run(encoder.tool_traits()) == Tokenizer(hf_tokenizer()).find_tool_traits()
    assert tokenizer.threads
    assert threading.main_thread() not in tokenizer.threads
    tokenizer.threads.clear()
    run(encoder.tool_traits())
    assert not tokenizer.threads


def test_many_tokens_are_decoded_in_a_thread() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    ids = tokenizer.encode("word " * 5000)
    tokenizer.threads.clear()
    assert run(encoder.detokenize(ids, vocab_size=400)) == Tokenizer(hf_tokenizer()).decode(ids)
    assert threading.main_thread() not in tokenizer.threads


def test_a_text_far_beyond_the_context_is_refused_by_its_first_part() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    text = "many different words here " * 40_000
    with pytest.raises(ContextLengthError, match="1,040,000 characters") as caught:
        run(encoder.encode_texts([text]))
    assert caught.value.param == "prompt"
    assert max(tokenizer.encoded_chars) < 1000
    with pytest.raises(ContextLengthError) as caught:
        run(encoder.encode_chat([{"role": "user", "content": text}]))
    assert caught.value.param == "messages"
    assert max(tokenizer.encoded_chars) < 1000


def test_a_text_longer_than_all_tokens_of_the_context_is_refused_by_its_length() -> None:
    tokenizer = WatchedTokenizer()
    longest = tokenizer.longest_token_bytes
    assert longest is not None
    # Few tokens at first, so that the first part tells nothing.
    text = " " * 8 * CONTEXT + "word" * CONTEXT * longest
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    with pytest.raises(ContextLengthError):
        run(encoder.encode_texts([text]))
    assert max(tokenizer.encoded_chars) < len(text)


@settings(max_examples=examples(30, 60), deadline=None)
@given(st.text(alphabet=st.sampled_from("ab  \n.,é漢"), min_size=CONTEXT, max_size=30 * CONTEXT))
def test_only_what_does_not_fit_is_refused_early(text: str) -> None:
    tokenizer = Tokenizer(hf_tokenizer())
    try:
        [ids] = run(PromptEncoder(tokenizer, max_model_len=CONTEXT).encode_texts([text]))
    except ContextLengthError:
        assert len(tokenizer.encode(text)) > CONTEXT
    else:
        assert ids == tokenizer.encode(text)


def test_conversations_are_bounded_in_messages_and_parts() -> None:
    refuse_many_messages(MAX_MESSAGES, MAX_MESSAGES)
    for num_messages, num_parts, what in ((MAX_MESSAGES + 1, 0, "messages"), (1, MAX_MESSAGES + 1, "parts")):
        with pytest.raises(InvalidRequestError, match=what) as caught:
            refuse_many_messages(num_messages, num_parts)
        assert caught.value.param == "messages"


def test_tokenizing_and_decoding_are_bounded() -> None:
    tokenizer = WatchedTokenizer()
    encoder = PromptEncoder(tokenizer, max_model_len=CONTEXT)
    with pytest.raises(InvalidRequestError, match="several requests"):
        run(encoder.tokenize("x" * (MAX_TEXT_CHARS + 1)))
    assert tokenizer.encoded_chars == []
    assert run(encoder.detokenize([5] * MAX_DECODED_TOKENS, vocab_size=10))
    with pytest.raises(InvalidRequestError, match="several requests"):
        run(encoder.detokenize([5] * (MAX_DECODED_TOKENS + 1), vocab_size=10))
    for wrong in (10, -1):
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            run(encoder.detokenize([*[5] * 10_000, wrong, 5], vocab_size=10))


def test_a_closed_encoder_leaves_no_thread_at_work() -> None:
    encoder = PromptEncoder(WatchedTokenizer(), max_model_len=100_000)
    run(encoder.encode_texts(["word " * 2000]))
    encoder.close()
    with pytest.raises(RuntimeError):
        run(encoder.encode_texts(["word " * 2000]))
