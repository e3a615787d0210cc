from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tiny
from serving_fakes import hf_tokenizer, tiny_tokenizer

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import (
    AdapterConflictError,
    AdapterError,
    AdapterFormatError,
    EngineDeadError,
    InvalidRequestError,
    OptionError,
    UnknownModelError,
)
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams
from loraplex.core.shape import ModelShape
from loraplex.core.stats import EngineStats
from loraplex.engine.llm import LLM, Completion, EngineParts

SHAPE = ModelShape(
    family="llama",
    num_layers=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=400,
    max_position=128,
)


class EchoCore:
    """Repeats each prompt, one token a step."""

    max_model_len = 128

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []
        self.running: dict[str, list[int]] = {}
        self.cancelled: list[str] = []
        self.adapters: list[str] = []
        self.removed: list[str] = []
        self.closed = False

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self.running[request.request_id] = list(request.prompt_token_ids)

    def cancel(self, request_id: str) -> None:
        if self.running.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def add_adapter(self, spec: AdapterSpec) -> None:
        self.adapters.append(spec.version)

    def remove_adapter(self, version: str) -> None:
        self.adapters.remove(version)
        self.removed.append(version)

    num_required = 0

    def stage_adapter(self, version: str) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def take_removed_adapters(self) -> Sequence[str]:
        removed, self.removed = self.removed, []
        return removed

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> Sequence[EngineOutput]:
        outputs = []
        for request_id, tokens in list(self.running.items()):
            token_id, *rest = tokens
            reason = None if rest else FinishReason.STOP
            outputs.append(EngineOutput(request_id=request_id, token_ids=(token_id,), finish_reason=reason))
            self.running[request_id] = rest
            if not rest:
                del self.running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def core() -> EchoCore:
    return EchoCore()


@pytest.fixture
def parts(core: EchoCore) -> EngineParts:
    return EngineParts(core=core, tokenizer=tiny_tokenizer(), shape=SHAPE)


@pytest.fixture
def llm(parts: EngineParts) -> Iterator[LLM]:
    with LLM("unused", parts=parts) as llm:
        yield llm


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, and two adapters in its subfolder `adapters`."""
    folder = tmp_path_factory.mktemp("model")
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    for seed, name in enumerate(("one", "two")):
        tiny.save_adapter(folder / "adapters" / name, base, rank=4, seed=seed)
    return folder


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("Hello world", ["Hello world"]),
        (["Hello", "wörld 😀"], ["Hello", "wörld 😀"]),
        (tiny_tokenizer().encode("the dog"), ["the dog"]),
        ([tiny_tokenizer().encode("the"), tiny_tokenizer().encode("dog")], ["the", "dog"]),
        ([], []),
    ],
)
def test_prompts_have_four_forms(llm: LLM, prompts: str | list[str] | list[int], texts: list[str]) -> None:
    completions = llm.generate(prompts)
    assert [completion.text for completion in completions] == texts
    assert all(completion.choices[0].finish_reason is FinishReason.STOP for completion in completions)


def test_each_prompt_can_have_its_own_parameters(llm: LLM, core: EchoCore) -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(n=2, seed=5)]
    first, second = llm.generate(["a", "b"], params=params)
    assert (len(first.choices), len(second.choices)) == (1, 2)
    assert [r.params.temperature for r in core.requests].count(1.0) == 2
    seeds = [r.params.seed for r in core.requests if r.params.seed is not None]
    assert 5 in seeds
    assert len(set(seeds)) == 2


def test_lists_must_have_one_entry_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="1 entry for 2 prompts"):
        llm.generate(["a", "b"], params=[SamplingParams()])
    with pytest.raises(InvalidRequestError, match="mix"):
        llm.generate([1, "a"])  # type: ignore[list-item]


def test_one_bad_prompt_stops_nothing_halfway(llm: LLM, core: EchoCore) -> None:
    with pytest.raises(InvalidRequestError, match="128"):
        llm.generate([[1], [1] * 200])
    assert core.requests == []


def test_a_conversation_is_answered_by_template(llm: LLM, core: EchoCore) -> None:
    [completion] = llm.chat([{"role": "user", "content": "hi"}])
    prompt = tiny_tokenizer().decode(completion.prompt_token_ids)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    both = llm.chat([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "you"}]], shout=True)
    assert [tiny_tokenizer().decode(c.prompt_token_ids).endswith("HEY ") for c in both] == [True, True]


@pytest.mark.parametrize("messages", ["hi", ["hi", "you"], [["hi"]], [5]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: object) -> None:
    with pytest.raises(InvalidRequestError, match="lists of messages"):
        llm.chat(messages)  # type: ignore[arg-type]


def test_generate_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def notebook_cell() -> str:
        return llm.generate("Hello")[0].text

    assert asyncio.run(notebook_cell()) == "Hello"


def test_errors_inside_a_running_event_loop_are_raised(llm: LLM) -> None:
    async def notebook_cell() -> None:
        llm.generate([])
        llm.generate("")

    with pytest.raises(InvalidRequestError, match="empty"):
        asyncio.run(notebook_cell())


def test_asynchronous_use(llm: LLM, core: EchoCore) -> None:
    async def use() -> tuple[list[str], str, str]:
        several = await asyncio.gather(*(llm.agenerate(f"number {i}") for i in range(5)))
        parts = [delta.text async for delta in llm.astream("Hello world")]
        stream = llm.astream([5] * 100)
        first = await anext(stream)
        await stream.aclose()
        return [completion.text for completion in several], "".join(parts), first.text

    several, streamed, _ = asyncio.run(use())
    assert several == [f"number {i}" for i in range(5)]
    assert streamed == "Hello world"


def test_one_prompt_or_conversation_in_is_one_completion_out(llm: LLM) -> None:
    async def use() -> tuple[Completion, Completion]:
        answered = await llm.achat([{"role": "user", "content": "hi"}], shout=True)
        return await llm.agenerate([5, 6], params=SamplingParams(max_tokens=1)), answered

    completion, answered = asyncio.run(use())
    assert completion.prompt_token_ids == (5, 6)
    assert tiny_tokenizer().decode(answered.prompt_token_ids).endswith("HEY ")
    for several in (["a", "b"], [[5], [6]]):
        with pytest.raises(InvalidRequestError, match=r"one prompt.*gather"):
            asyncio.run(llm.agenerate(several))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=r"one prompt.*gather"):
            asyncio.run(anext(llm.astream(several)))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="one conversation"):
        asyncio.run(llm.achat([[{"role": "user", "content": "hi"}]]))  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="empty"):
        asyncio.run(llm.agenerate(""))


def test_adapters_come_from_a_folder_a_list_or_a_dict(
    parts: EngineParts, core: EchoCore, model_folder: Path
) -> None:
    folder = model_folder / "adapters"
    for adapters, names in (
        (folder, ["one", "two"]),
        (str(folder / "one"), ["one"]),
        ([folder / "two"], ["two"]),
        ({"nick": folder / "one"}, ["nick"]),
    ):
        with LLM("unused", adapters=adapters, parts=parts) as llm:  # type: ignore[arg-type]
            assert llm.adapters == names
            [completion] = llm.generate("Hello", adapter=names[0])
            assert completion.text == "Hello"
            assert core.requests[-1].adapter == core.adapters[-len(names)]


def test_adapters_of_the_hub_are_named_after_their_repository(
    parts: EngineParts, core: EchoCore, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo_id: str, **_: object) -> str:
        return str(model_folder / "adapters" / repo_id.removeprefix("org/"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for adapters, names in (
        ("org/one", ["one"]),
        (["org/one@v1", model_folder / "adapters" / "two"], ["one", "two"]),
        ({"nick": "org/two"}, ["nick"]),
    ):
        with LLM("unused", adapters=adapters, parts=parts) as llm:  # type: ignore[arg-type]
            assert llm.adapters == names
            llm.generate("Hello", adapter=names[0])
            assert core.requests[-1].adapter == core.adapters[-len(names)]
    with pytest.raises(AdapterError, match="no folder neither, and it is no repository"):
        LLM("unused", adapters="neither", parts=parts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"batching": "autp"},
            "there is no batching policy 'autp'; did you mean auto.",
        ),
        ({"batching": "?"}, "there is no batching policy '.'; there are fcfs, merged"),
        ({"cold_start": "overlapp"}, "there is no cold start policy 'overlapp'; did you mean overlap"),
        ({"max_delay_by_grouping": "5%"}, "the bound is for batching by grouped or auto, not fcfs"),
        ({"batching": "auto", "max_delay_by_grouping": "soon"}, "'soon' is no bound; write it like 25%"),
    ],
)
def test_options_that_have_no_such_value_are_refused(
    parts: EngineParts, options: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        LLM("unused", parts=parts, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, OptionError)


def test_adapters_can_be_added_and_removed(llm: LLM, core: EchoCore, model_folder: Path) -> None:
    folder = model_folder / "adapters"
    llm.add_adapter("first", folder / "one")
    llm.add_adapter("again", folder / "one")
    with pytest.raises(AdapterConflictError, match="'first'"):
        llm.add_adapter("first", folder / "two")
    llm.generate(["a", "b"], adapter=["first", None])
    assert {request.adapter for request in core.requests} == {core.adapters[0], None}
    llm.remove_adapter("first")
    assert len(core.adapters) == 2  # the other name still needs the version
    with pytest.raises(UnknownModelError, match="again"):
        llm.generate("a", adapter="first")
    llm.remove_adapter("again")


@pytest.mark.parametrize("given", ["folder", "folder of folders", "list"])
def test_a_broken_adapter_is_named_and_closes_the_engine(
    parts: EngineParts, core: EchoCore, tmp_path: Path, given: str
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "use_dora": true}')
    adapters = {"folder": str(bad), "folder of folders": tmp_path, "list": [bad]}[given]
    with pytest.raises(AdapterFormatError) as caught:
        LLM("unused", adapters=adapters, parts=parts)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"adapter 'bad' ({bad}): ")
    assert isinstance(caught.value.__cause__, AdapterFormatError)
    assert caught.value.field == caught.value.__cause__.field
    assert core.closed


def test_a_closed_engine_says_so(parts: EngineParts, core: EchoCore) -> None:
    llm = LLM("unused", parts=parts)
    llm.close()
    llm.close()
    assert core.closed
    with pytest.raises(EngineDeadError):
        llm.generate("Hello")


def test_a_real_model_is_loaded_from_its_folder(model_folder: Path) -> None:
    with LLM(model_folder, adapters=model_folder / "adapters", kv_memory_bytes=1 << 22, num_threads=1) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        base, one, two = llm.generate(["the dog"] * 3, adapter=[None, "one", "two"], params=params)
        texts = {completion.choices[0].token_ids for completion in (base, one, two)}
        assert len(texts) == 3
        assert llm.generate("the dog", adapter="one", params=params)[0].choices == one.choices
