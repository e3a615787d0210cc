"""Text to tokens and back, and chat messages to a prompt, for one base model."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from loraplex.core.errors import InvalidRequestError, ModelError
from loraplex.core.logs import adopt_library_loggers
from loraplex.engine.detokenizer import Detokenizer, PieceTable
from loraplex.model.config import load_config
from loraplex.model.source import resolve_model

# Encoding costs about a microsecond per character: longer texts go to a thread, so that one long
# prompt does not hold up the tokens of every other stream. The tokenizer releases the GIL meanwhile.
_THREAD_ABOVE_CHARS: Final = 4096

Message = Mapping[str, Any]


class Tokenizer:
    """A fast Hugging Face tokenizer with the few operations serving needs. Safe to use from threads."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: tuple[int, ...] = ()) -> None:
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelError("the model has no fast tokenizer (tokenizer.json); convert it with transformers")
        self._hf = hf_tokenizer
        # The wrapper changes truncation and padding on every call, which is not safe between threads;
        # the tokenizer beneath is, once they are off.
        self._backend = hf_tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pieces = PieceTable(self._backend)
        own_eos = hf_tokenizer.eos_token_id
        extra = () if own_eos is None or own_eos in eos_token_ids else (own_eos,)
        self.eos_token_ids: tuple[int, ...] = (*eos_token_ids, *extra)

    @classmethod
    def load(cls, model_path: str | Path) -> Self:
        """Load from a model folder or a hub id, with the end tokens of the model's configuration."""
        # Imported here: it takes seconds, and `loraplex --help` must not.
        from transformers import AutoTokenizer

        adopt_library_loggers()
        folder = resolve_model(str(model_path), weights=False)
        eos_token_ids = load_config(folder).eos_token_ids
        try:
            hf_tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        return cls(hf_tokenizer, eos_token_ids=eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens the tokenizer knows; the model's own vocabulary may be padded beyond it."""
        return len(self._hf)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            # The only way a str is refused: it cannot be written as UTF-8.
            raise InvalidRequestError("the text holds lone surrogates, which are not characters") from error
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`, without blocking the event loop for long texts."""
        if len(text) <= _THREAD_ABOVE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder for tokens that continue `context`."""
        return self.pieces.detokenizer(context)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for a conversation, by the model's own template."""
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or put a chat_template into its "
                "tokenizer_config.json",
                param="messages",
            )
        options = dict(template_options or {})
        if reserved := sorted(options.keys() & _reserved_options(self._hf)):
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {reserved[0]!r}", param="chat_template_kwargs"
            )
        try:
            return str(
                self._hf.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **options,
                )
            )
        except Exception as error:
            # A template is a program of the model's author that runs on the caller's messages: whatever
            # it raises (roles must alternate, a missing key, a type) is about those messages.
            raise InvalidRequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    async def encode_chat_async(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render and encode a conversation. Templates write the special tokens themselves."""

        def render_and_encode() -> list[int]:
            text = self.render_chat(
                messages, add_generation_prompt=add_generation_prompt, template_options=template_options
            )
            return self.encode(text, add_special_tokens=add_special_tokens)

        num_chars = sum(len(str(message.get("content") or "")) for message in messages)
        if num_chars <= _THREAD_ABOVE_CHARS:
            return render_and_encode()
        return await asyncio.to_thread(render_and_encode)


def _reserved_options(hf_tokenizer: Any) -> set[str]:
    """Names that belong to the rendering call itself and so cannot be template variables."""
    return {*inspect.signature(hf_tokenizer.apply_chat_template).parameters, "messages"}
