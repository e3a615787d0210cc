"""The engine as a Python object: prompts in, completions out, no server.

with LLM("path/to/model", adapters="path/to/adapters") as llm:
    [completion] = llm.generate("Once upon a time", adapter="pirate")
    print(completion.text)
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from loraplex.adapters.discovery import discover_adapters
from loraplex.adapters.names import validate_adapter_name
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.remote import RemoteSource, locate_adapter, resolve_adapter
from loraplex.adapters.spec import CONFIG_FILE
from loraplex.core.batching import Batching, bound_of
from loraplex.core.choices import choice
from loraplex.core.cold_start import ColdStart
from loraplex.core.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterFormatError,
    CapacityError,
    InvalidRequestError,
    UnknownModelError,
)
from loraplex.core.request import FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.core.words import plural, unknown_name
from loraplex.engine.async_local import LocalAsyncEngine
from loraplex.engine.interface import EngineCore
from loraplex.engine.text_engine import CheckedPrompts, LogprobText, TextDelta, TextEngine
from loraplex.engine.tokenizer import Message, Tokenizer

T = TypeVar("T")

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Adapters = str | Path | Sequence[str | Path] | Mapping[str, str | Path]
AdapterNames = str | None | Sequence[str | None]
ParamsList = SamplingParams | None | Sequence[SamplingParams]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of the n answers to a prompt.

    `num_sampled` counts the tokens the model generated: those of the answer, and the token that ended it.
    """

    text: str
    token_ids: tuple[int, ...]
    num_sampled: int
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[LogprobText, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """All answers to one prompt."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[LogprobText, ...] | None = None

    @property
    def text(self) -> str:
        """The first choice's text, which is the only one unless n was above 1."""
        return self.choices[0].text


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The components of an LLM."""

    core: EngineCore
    tokenizer: Tokenizer
    shape: ModelShape


class LLM:
    """A base model with adapters, in this process. Close it, or use it as a context manager.

    `adapters` is a folder of adapters, a list of adapter folders (named after them), or a dict of name to
    folder. Instead of an adapter's folder, a string may be a repository of the Hugging Face hub (`owner/name`
    or `owner/name@revision`) or `s3://bucket/prefix`. `tensor_parallel` processes share the model, this one
    and its children; memory limits apply to each of them. `batching` is a policy by name,
    `max_delay_by_grouping` its bound as on the command line, such as `25%,250ms`. Raises OptionError, a
    ValueError, for a name or a bound that there is not. The synchronous methods may be called from any
    thread, the asynchronous ones from any event loop.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Adapters = (),
        device: str = "auto",
        dtype: str = "auto",
        kv_memory_bytes: int | None = None,
        memory_fraction: float | None = None,
        host_adapter_memory_bytes: int | None = None,
        kv_swap_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        tensor_parallel: int = 1,
        cold_start: str = ColdStart.AUTO,
        batching: str = Batching.FCFS,
        max_delay_by_grouping: str | None = None,
        parts: EngineParts | None = None,
    ) -> None:
        policy = choice("batching policy", batching, Batching)
        max_delay = bound_of(max_delay_by_grouping, policy)
        start_policy = choice("cold start policy", cold_start, ColdStart)
        if parts is None:
            # Imported here: tests bring their own parts, and this import brings torch.
            from loraplex.engine.options import EngineOptions

            options = EngineOptions(
                model=str(model),
                device=device,
                dtype=dtype,
                kv_memory_bytes=kv_memory_bytes,
                memory_fraction=memory_fraction,
                host_adapter_memory_bytes=host_adapter_memory_bytes,
                kv_swap_memory_bytes=kv_swap_memory_bytes,
                max_model_len=max_model_len,
                num_threads=num_threads,
                tensor_parallel=tensor_parallel,
                cold_start=start_policy,
                batching=policy,
                max_delay=max_delay,
            )
            parts = _build(options)
        self._shape = parts.shape
        self._engine = LocalAsyncEngine(parts.core)
        self._text = TextEngine(
            engine=self._engine,
            tokenizer=parts.tokenizer,
            max_model_len=parts.core.max_model_len,
            vocab_size=parts.shape.vocab_size,
        )
        self._versions: dict[str, str] = {}
        self._request_numbers = itertools.count()
        try:
            for name, path in _named_sources(adapters):
                self.add_adapter(name, path)
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters, sorted."""
        return sorted(self._versions)

    def add_adapter(self, name: str, path: str | Path) -> None:
        """Make an adapter available under a name. Its weights are read when it is first used.

        `path` is its folder, or a repository of the hub or a URL of S3, which is fetched in this thread, not
        the engine's.
        """
        if validate_adapter_name(name) in self._versions:
            raise AdapterConflictError(f"there already is an adapter {name!r}; remove it first")
        with _naming(name, path):
            spec = read_adapter(resolve_adapter(path), self._shape)
            _run(self._engine.add_adapter(spec))
        self._versions[name] = spec.version

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; return after its requests in flight have ended."""
        version = self._version_of(name)
        assert version is not None
        del self._versions[name]
        if version not in self._versions.values():
            _run(self._engine.remove_adapter(version))

    def generate(
        self, prompts: Prompts, adapter: AdapterNames = None, params: ParamsList = None
    ) -> list[Completion]:
        """Complete one or several prompts (texts or token ids), batched together.

        `adapter` and `params` are one for all prompts, or a list with one for each.
        """
        return _run(self._generate(prompts, adapter, params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        adapter: AdapterNames = None,
        params: ParamsList = None,
        **template_options: Any,
    ) -> list[Completion]:
        """Answer one or several conversations, rendered with the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if not all(map(_is_conversation, conversations)):
            raise InvalidRequestError(
                "chat answers conversations, which are lists of messages such as "
                '{"role": "user", "content": "Hello"}; generate completes texts',
                param="messages",
            )
        prompts = [
            self._chat_prompt(conversation, template_options)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, adapter, params)

    async def agenerate(
        self, prompt: str | Sequence[int], adapter: str | None = None, params: SamplingParams | None = None
    ) -> Completion:
        """Complete one prompt (text or token ids). Calls that are awaited together share batches, as with
        `asyncio.gather`; a cancelled call ends its request."""
        [completion] = await self._generate([self._one_prompt(prompt)], adapter, params)
        return completion

    async def achat(
        self,
        messages: Sequence[Message],
        adapter: str | None = None,
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Completion:
        """Answer one conversation, rendered with the model's chat template; otherwise like `agenerate`."""
        if not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError(
                "achat answers one conversation, a list of messages; gather calls for several",
                param="messages",
            )
        return await self.agenerate(self._chat_prompt(messages, template_options), adapter, params)

    async def _generate(
        self, prompts: Prompts, adapter: AdapterNames, params: ParamsList
    ) -> list[Completion]:
        tokens = self._token_prompts(prompts)
        names: list[str | None] = _one_each(adapter, len(tokens), "adapter")
        options: list[SamplingParams | None] = _one_each(params, len(tokens), "params")
        versions = [self._version_of(name) for name in names]
        for option in options:
            await self._text.check_structure(option or SamplingParams())
        checked = [
            self._text.check([prompt], option or SamplingParams())
            for prompt, option in zip(tokens, options, strict=True)
        ]
        jobs = [
            asyncio.ensure_future(self._complete(each, version))
            for each, version in zip(checked, versions, strict=True)
        ]
        try:
            return list(await asyncio.gather(*jobs))
        finally:
            # If one failed, the others must not go on without a reader.
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def astream(
        self, prompt: str | Sequence[int], adapter: str | None = None, params: SamplingParams | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas of one prompt as they arrive; close the generator to cancel."""
        tokens = self._one_prompt(prompt)
        await self._text.check_structure(params or SamplingParams())
        checked = self._text.check([tokens], params or SamplingParams())
        stream = self._stream(checked, self._version_of(adapter))
        async with aclosing(stream):
            async for batch in stream:
                for delta in batch:
                    yield delta

    def close(self) -> None:
        """Stop the engine and free its memory; requests in flight raise EngineDeadError. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(self, checked: CheckedPrompts, version: str | None) -> AsyncGenerator[list[TextDelta], None]:
        request_id = f"llm-{next(self._request_numbers)}"
        return self._text.stream(checked, adapter=version, request_id=request_id)

    async def _complete(self, checked: CheckedPrompts, version: str | None) -> Completion:
        """`checked`: one prompt."""
        [prompt] = checked.prompts
        deltas: list[list[TextDelta]] = [[] for _ in range(checked.num_choices)]
        async with aclosing(self._stream(checked, version)) as stream:
            async for batch in stream:
                for delta in batch:
                    deltas[delta.choice].append(delta)
        first = deltas[0]
        return Completion(
            prompt_token_ids=tuple(prompt),
            choices=tuple(map(_choice, deltas)),
            num_cached_tokens=max(delta.num_cached_tokens for delta in first),
            prompt_logprobs=first[0].prompt_logprobs,
        )

    def _chat_prompt(self, messages: Sequence[Message], template_options: dict[str, Any]) -> list[int]:
        text = self.tokenizer.render_chat(
            [dict(message) for message in messages],
            template_options=template_options,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _one_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str) and not all(isinstance(item, int) for item in prompt):
            raise InvalidRequestError(
                "this takes one prompt, a text or token ids; gather calls for several", param="prompt"
            )
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _token_prompts(self, prompts: Prompts) -> list[list[int]]:
        if isinstance(prompts, str):
            return [self.tokenizer.encode(prompts)]
        if prompts and all(isinstance(item, int) for item in prompts):
            return [[item for item in prompts if isinstance(item, int)]]
        tokens: list[list[int]] = []
        for item in prompts:
            if isinstance(item, int):
                raise InvalidRequestError(
                    "prompts must not mix token ids with texts or lists", param="prompt"
                )
            tokens.append(self.tokenizer.encode(item) if isinstance(item, str) else list(item))
        return tokens

    def _version_of(self, name: str | None) -> str | None:
        if name is None:
            return None
        version = self._versions.get(name)
        if version is None:
            raise UnknownModelError(unknown_name("adapter", name, self.adapters))
        return version


@contextmanager
def _naming(name: str, path: str | Path) -> Iterator[None]:
    """Add the adapter's name and path to errors: one of many may be bad."""
    prefix = f"adapter {name!r} ({path}): "
    try:
        yield
    except AdapterFormatError as error:
        raise AdapterFormatError(f"{prefix}{error}", field=error.field) from error
    except (AdapterError, CapacityError) as error:
        raise type(error)(f"{prefix}{error}") from error


def _build(options: Any) -> EngineParts:
    from loraplex.engine.build import build_core
    from loraplex.model.config import load_config
    from loraplex.model.source import resolve_model

    config = load_config(resolve_model(options.model))
    tokenizer = Tokenizer.load(options.model)  # first: a core may have child processes to clean up
    return EngineParts(core=build_core(options), tokenizer=tokenizer, shape=config.shape)


def _named_sources(adapters: Adapters) -> list[tuple[str, str | Path]]:
    """Return the names with the folder or repository of each."""
    if isinstance(adapters, Mapping):
        return list(adapters.items())
    if isinstance(adapters, (str, Path)):
        located = locate_adapter(adapters)
        if isinstance(located, Path) and not (located / CONFIG_FILE).is_file():
            return list(discover_adapters(located).adapters)
        adapters = [adapters]
    return [(_name(locate_adapter(source)), source) for source in adapters]


def _name(located: Path | RemoteSource) -> str:
    return located.resolve().name if isinstance(located, Path) else located.name


def _choice(deltas: Sequence[TextDelta]) -> Choice:
    last = deltas[-1]
    assert last.finish_reason is not None, "a stream ends with a reason"
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        num_sampled=sum(delta.num_sampled for delta in deltas),
        finish_reason=last.finish_reason,
        stop=last.stop,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


def _is_conversation(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value)


def _one_each(value: Any, count: int, param: str) -> list[Any]:
    """Return the value for each of `count` prompts; a list must have that length."""
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            entries = "1 entry" if len(value) == 1 else f"{len(value)} entries"
            raise InvalidRequestError(
                f"{param} has {entries} for {count} {plural('prompt', count)}", param=param
            )
        return list(value)
    return [value] * count


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to the end from synchronous code, even inside a running event loop (as in a
    notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="llm-call")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
