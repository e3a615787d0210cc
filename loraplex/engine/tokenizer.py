"""Converts text to tokens and back, and chat messages to a prompt, for one base model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from loraplex.core.errors import InvalidRequestError, ModelError
from loraplex.core.logs import adopt_library_loggers
from loraplex.engine.detokenizer import Detokenizer, PieceTable
from loraplex.engine.tool_traits import PROBES, ToolTraits, traits_of
from loraplex.model.config import load_config
from loraplex.model.source import resolve_model

Message = Mapping[str, Any]

_TEMPLATE_ARGUMENTS: Final = ("self", "conversations", "messages")
"""Arguments of the calls that render a template, beside those of `apply_chat_template`."""
_TEMPLATE_FUNCTIONS: Final = (
    *("raise_exception", "strftime_now"),
    *("cycler", "dict", "joiner", "lipsum", "namespace", "range"),
)
"""Functions of transformers and of Jinja that every template may call."""


class Tokenizer:
    """A fast Hugging Face tokenizer with the operations that serving needs. Thread-safe."""

    def __init__(self, hf_tokenizer: Any, *, eos_token_ids: tuple[int, ...] = ()) -> None:
        if not getattr(hf_tokenizer, "is_fast", False):
            raise ModelError("the model has no fast tokenizer (tokenizer.json); convert it with transformers")
        self._hf = hf_tokenizer
        # The wrapper changes truncation and padding on every call, which is not thread-safe;
        # the tokenizer beneath it is, once they are off.
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
        # Imported here: it takes seconds, and `loraplex --help` must not wait for it.
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

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Bytes of the longest token, if every byte of a text becomes part of a token; otherwise None."""
        return self.pieces.longest_piece_bytes()

    @cached_property
    def template_text(self) -> str:
        """The source of the chat template, or of all of them where a model has several; empty if it has
        none."""
        template = self._hf.chat_template or ""
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)

    @property
    def template_knows_tools(self) -> bool:
        """Return whether the chat template handles calls; one that does not would drop them."""
        return "tool" in self.template_text

    def find_tool_traits(self) -> ToolTraits:
        """Return the traits of the chat template with tools. Takes some milliseconds."""
        return traits_of([self._probed(probe.messages, probe.tools, {}) for probe in PROBES])

    def token_id(self, text: str) -> int | None:
        """Return the id of a text that was added to the vocabulary as one token; None if it was not."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._added_ids else None

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.encode_many([text], add_special_tokens=add_special_tokens)[0]

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the tokens of each text, computed without the GIL, which the library's own `encode` would
        hold."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            # A str is refused only if it cannot be written as UTF-8.
            raise InvalidRequestError("the text holds lone surrogates, which are not characters") from error
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, computed without the GIL, which the library's own `decode` would
        hold."""
        texts = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(texts[0])

    def detokenizer(
        self,
        context: Sequence[int] = (),
        *,
        with_offsets: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Return an incremental decoder for tokens that continue `context`. `shown_ids`: special tokens whose
        names are part of the text."""
        return self.pieces.detokenizer(context, with_offsets=with_offsets, shown_ids=shown_ids)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The special tokens by name, which templates may use."""
        return dict(self._hf.special_tokens_map)

    def check_template_options(self, options: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for names that are the server's or the model's to set."""
        if reserved := sorted(options.keys() & self._reserved_options):
            raise InvalidRequestError(
                f"chat_template_kwargs may not hold {reserved[0]!r}, which the server or the model sets; "
                "leave it out, and give what the request has a field for in that field",
                param="chat_template_kwargs",
            )

    @cached_property
    def _reserved_options(self) -> frozenset[str]:
        arguments = inspect.signature(self._hf.apply_chat_template).parameters
        return frozenset({*arguments, *self.template_variables, *_TEMPLATE_ARGUMENTS, *_TEMPLATE_FUNCTIONS})

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt text of a conversation, rendered with the model's own template."""
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or put a chat_template into its "
                "tokenizer_config.json",
                param="messages",
            )
        if any(map(_is_about_tools, messages)) and not self.template_knows_tools:
            raise InvalidRequestError(
                "this model's chat template does not know tools: leave out messages with tool_calls and "
                "those of the role 'tool', or put a template that knows them into the model's folder as "
                "chat_template.jinja",
                param="messages",
            )
        options = dict(template_options or {})
        self.check_template_options(options)
        options["add_generation_prompt"] = add_generation_prompt
        try:
            return self._apply_template(messages, tools, options)
        except Exception as error:
            # A template is a program by the model's author that runs on the caller's messages and tools:
            # whatever it raises (roles must alternate, a missing key, a type) is about those.
            renders_without = bool(tools) and self._probed(messages, (), options) is not None
            blamed = "tools" if renders_without else "messages"
            raise InvalidRequestError(
                f"the model's chat template refused the {blamed}: {error}", param=blamed
            ) from error

    def _probed(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str | None:
        """Return the rendered conversation; None if the template refuses it, for whatever reason."""
        try:
            return self._apply_template(messages, tools, options)
        except Exception:
            return None

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> str:
        return str(
            self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                **options,
            )
        )


def _is_about_tools(message: Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))
