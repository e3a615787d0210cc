"""The Python examples of README and docs run as they stand: but for the server's address, the model, and the
time between two looks at a batch."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import tiny
from server_fixtures import Served, live
from serving_fakes import Script, hf_tokenizer
from tool_templates import tool_tokenizer

from loraplex import LLM
from loraplex.core.request import EngineRequest
from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, block.start()) + 2}": block[1]
    for document in DOCUMENTS
    for text in [document.read_text(encoding="utf-8")]
    for block in _BLOCK.finditer(text)
}
CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'
LINE = (
    '{"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"model": "sql", "messages": [{"role": "user", "content": "hi"}]}}\n'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and the adapters that examples name: `adapters`, and one elsewhere."""
    folder = tmp_path_factory.mktemp("model")
    base = tiny.save_model(folder, vocab_size=400)
    hf_tokenizer().save_pretrained(folder)
    for seed, name in enumerate(("sql", "poet", "support-bot", "../faq")):
        tiny.save_adapter(folder / "adapters" / name, base, rank=4, seed=seed)
    return folder


def served(make_served: Callable[..., Served]) -> Served:
    """Return a server whose model calls a tool if it has to, and says something otherwise."""
    tokenizer = Tokenizer(tool_tokenizer("hermes"))

    def script(request: EngineRequest) -> Script:
        wanted = request.params.structured_output
        calls = wanted is not None and wanted.param == "tools"
        return Script(token_ids=tokenizer.encode(CALL if calls else "Seven.", add_special_tokens=False))

    made = make_served(script, names=("pirate", "sql"))
    text = made.deps.text
    text.tokenizer, text.max_model_len, text.vocab_size = tokenizer, 1024, tokenizer.vocab_size
    text.prompts = PromptEncoder(tokenizer, max_model_len=1024)
    return made


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_it_stands(
    name: str,
    make_served: Callable[..., Served],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = EXAMPLES[name]
    (tmp_path / "adapters").symlink_to(model / "adapters")
    (tmp_path / "batch.jsonl").write_text(LINE)
    monkeypatch.chdir(tmp_path)
    example = example.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
    example = example.replace("my-org/faq-lora", str(model / "faq")).replace(
        "time.sleep(10)", "time.sleep(0.1)"
    )
    if "http://127.0.0.1:8000" not in example:
        run(example, name)
        return
    with live(served(make_served)) as url:
        run(example.replace("http://127.0.0.1:8000", url), name)


def run(example: str, name: str) -> None:
    """Run an example as a module, or as a cell of a notebook if it waits for something."""
    code = compile(example, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    space: dict[str, Any] = {"__name__": "example"}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(_cell(types.FunctionType(code, space)))
    else:
        exec(code, space)
    if (client := space.get("client")) is not None:
        client.close()


async def _cell(cell: Callable[[], Coroutine[Any, Any, None]]) -> None:
    await cell()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 10
    assert {name.partition(":")[0] for name in EXAMPLES} >= {"README.md", "docs/serving.md"}


def test_every_option_of_llm_is_described_with_its_default() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[^|]*) \| ([^|]*) \|", text.partition("`LLM` takes these options")[2], re.MULTILINE
    )
    described: dict[str, str] = {}
    for names, defaults in rows:
        options = re.findall(r"`(\w+)`", names)
        values = (
            defaults.split(", ") if len(options) == defaults.count(", ") + 1 else [defaults] * len(options)
        )
        described |= dict(zip(options, values, strict=True))
        if "batching" in options:
            break
    parameters = dict(inspect.signature(LLM).parameters)
    del parameters["model"], parameters["parts"]  # the first argument, and what only tests give
    assert list(described) == list(parameters)
    for name, parameter in parameters.items():
        if parameter.default is None or parameter.default == ():
            continue  # in words
        value = f'`"{parameter.default}"`' if isinstance(parameter.default, str) else str(parameter.default)
        assert described[name] == value
