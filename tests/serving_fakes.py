"""Hand-made stand-ins: an engine that says what it is told to, and a tokenizer small enough to build here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from loraplex.adapters.spec import AdapterSpec, LoraModule
from loraplex.core.errors import EngineDeadError, UnknownModelError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason, TokenLogprob
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.engine.tokenizer import Tokenizer

END_OF_TURN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}HEY {% endif %}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Hello world! How are you today? I am fine, thank you very much.",
    "Grüße aus Köln, привет мир, 你好世界, こんにちは, 😀 👍🏽 🇩🇪",
]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]


@cache
def byte_level_backend() -> BackendTokenizer:
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def hf_tokenizer(**overrides: Any) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {
        "tokenizer_object": byte_level_backend(),
        "eos_token": END_OF_TURN,
        "chat_template": CHAT_TEMPLATE,
    }
    return PreTrainedTokenizerFast(**{**options, **overrides})


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(hf_tokenizer())


def make_spec(version: str, path: Path = Path("/adapters/x"), rank: int = 8) -> AdapterSpec:
    module = LoraModule(layer=0, module="q_proj", rank=rank, scale=2.0, a_name="a", b_name="b")
    return AdapterSpec(version=version, path=path, modules=(module,), num_params=1024)


@dataclass
class Script:
    """The behaviour of the engine with a request.

    `pause_after` tokens it waits, for good unless `resume` is set. `fail_after` tokens it raises
    `failure`, or says so in an output if `failure` is None.
    """

    token_ids: Sequence[int]
    tokens_per_output: int = 1
    finish_reason: FinishReason = FinishReason.STOP
    pause_after: int | None = None
    resume: asyncio.Event | None = None
    fail_after: int | None = None
    failure: Exception | None = None
    num_cached_tokens: int = 0
    adapter_hit: bool | None = None


class FakeEngine:
    """An AsyncEngine without a model. Records what it was asked and which requests were cancelled."""

    def __init__(self, script: Callable[[EngineRequest], Script]) -> None:
        self.script = script
        self.requests: list[EngineRequest] = []
        self.adapters: dict[str, AdapterSpec] = {}
        self.staged: list[str] = []
        self.stage_failure: Exception | None = None
        self.removed: list[str] = []
        self.tenants: tuple[TenantPolicy, ...] = ()
        self.cancelled: list[str] = []
        self.dead = False
        # Threading events: the engine may run in a server's thread and the test in another.
        self.was_paused = threading.Event()
        self.was_cancelled = threading.Event()
        self.add_gate: asyncio.Event | None = None
        self.in_flight: dict[str, int] = {}

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        self._check_alive()
        self.requests.append(request)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise UnknownModelError(f"no adapter version {request.adapter}")
        key = request.adapter or ""
        self.in_flight[key] = self.in_flight.get(key, 0) + 1
        finished = False
        try:
            async for output in self._outputs(request, self.script(request)):
                finished = output.finish_reason is not None
                yield output
        except (GeneratorExit, asyncio.CancelledError):
            if not finished:
                self.cancelled.append(request.request_id)
                self.was_cancelled.set()
            raise
        finally:
            self.in_flight[key] -= 1

    async def add_adapter(self, spec: AdapterSpec) -> None:
        self._check_alive()
        if self.add_gate is not None:
            await self.add_gate.wait()
        self.adapters.setdefault(spec.version, spec)

    async def stage_adapter(self, version: str) -> None:
        self._check_alive()
        self.staged.append(version)
        if self.stage_failure is not None:
            raise self.stage_failure

    async def remove_adapter(self, version: str) -> None:
        self._check_alive()
        assert not self.in_flight.get(version), "removed while requests are in flight"
        del self.adapters[version]
        self.removed.append(version)

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        self.tenants = tuple(policies)

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_running=sum(self.in_flight.values()),
            num_kv_blocks=100,
            num_kv_blocks_used=25,
            host_adapter_budget_bytes=1 << 20,
            predicted_step_s=0.9,
            measured_step_s=1.2,
            adapters=tuple(
                AdapterStats(version=v, tier="host", num_bytes=4096, in_flight=0, loads=1)
                for v in self.adapters
            ),
        )

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine process died")

    async def _outputs(self, request: EngineRequest, script: Script) -> AsyncGenerator[EngineOutput, None]:
        await asyncio.sleep(0)
        if script.fail_after == 0 and script.failure is not None:
            raise script.failure  # it is refused
        yield EngineOutput(request_id=request.request_id)  # it is queued
        limit = request.params.max_tokens
        assert limit is not None, "the text engine sets max_tokens"
        tokens = list(script.token_ids[:limit])
        step = script.tokens_per_output
        for start in range(0, max(len(tokens), 1), step):
            if script.fail_after is not None and start >= script.fail_after:
                if script.failure is not None:
                    raise script.failure
                yield EngineOutput(
                    request_id=request.request_id, finish_reason=FinishReason.ERROR, error="out of luck"
                )
                return
            if script.pause_after is not None and start >= script.pause_after:
                self.was_paused.set()
                await (script.resume or asyncio.Event()).wait()
            part = tuple(tokens[start : start + step])
            last = start + step >= len(tokens)
            reason = FinishReason.LENGTH if len(tokens) == limit else script.finish_reason
            yield EngineOutput(
                request_id=request.request_id,
                token_ids=part,
                logprobs=tuple(_logprob(t, request.params.logprobs) for t in part)
                if request.params.logprobs is not None
                else (),
                prompt_logprobs=_prompt_logprobs(request) if start == 0 else None,
                num_cached_tokens=script.num_cached_tokens,
                adapter_hit=script.adapter_hit,
                finish_reason=reason if last else None,
                stop_token_id=2 if last and reason is FinishReason.STOP else None,
            )
            await asyncio.sleep(0)


def says(text: str, **options: Any) -> Callable[[EngineRequest], Script]:
    """A script that answers every request with one text."""
    token_ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    return lambda request: Script(token_ids=token_ids, **options)


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(
        token_id=token_id, logprob=-0.5, top=tuple((token_id + i, -0.5 - i) for i in range(num_top))
    )


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprob | None, ...] | None:
    if request.params.prompt_logprobs is None:
        return None
    rest = request.prompt_token_ids[1:]
    return (None, *(_logprob(token_id, request.params.prompt_logprobs) for token_id in rest))
