"""A tenant that reads all that a server answers, to find what is about others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from server_fixtures import USER, Api, stored
from tool_templates import tool_tokenizer

from loraplex.engine.prompt_encoder import PromptEncoder
from loraplex.engine.tokenizer import Tokenizer
from loraplex.server.batches.objects import ENDED
from loraplex.server.batches.runner import BatchRunner

NAMES = ("acme-chat", "acme-code", "globex-chat", "globex-secret", "shared-poet")
OTHERS = ("globex-chat", "globex-secret", "globex", "ops")
"""Names that acme must never read."""
MODELS: Final = [
    *("base", "acme-chat", "acme-cha", "globe-chat", "secret", "shared-poe", "base:globe-chat", "", "*"),
]
"""Good, bad and near names that acme asks for."""
_BATCH: Final = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
_FUNCTION: Final = {"name": "look", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """Ids of what a tenant has stored."""

    files: list[str] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)


def tenants_file(folder: Path | str = "/srv", **more: str) -> str:
    tables = {
        "acme": f'adapters = ["acme-*", "shared-*"]\nadministers = ["acme-*"]\nload_from = ["{folder}/acme"]',
        "globex": 'adapters = ["globex-*", "shared-*"]\nbase_model = false',
        "ops": "operator = true",
        "prometheus": "metrics = true\nbase_model = false",
    }
    return "\n".join(
        f"[tenants.{name}]\nkeys = [{stored(name + '-key')}]\n{text}\n{more.get(name, '')}"
        for name, text in tables.items()
    )


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


def chat(api: Api, name: str, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": USER, **fields}
    return api.post("/v1/chat/completions", body, headers=as_tenant(name))


def serve_tools(api: Api) -> None:
    """Give the server a model that knows tools."""
    text = api.served.deps.text
    text.prompts.close()
    text.tokenizer = Tokenizer(tool_tokenizer("qwen3"))
    text.vocab_size = text.tokenizer.vocab_size
    text.prompts = PromptEncoder(text.tokenizer, max_model_len=text.max_model_len)


def run_batch(api: Api, name: str, models: Sequence[str]) -> Belongings:
    """Run a batch of a tenant with a line for each model, to its end."""
    form = _form(_lines(models))
    uploaded = api.request("POST", "/v1/files", headers=as_tenant(name), **form).json()["id"]
    batch = api.run(_ended(api, name, begin_batch(api, name, uploaded)))
    files = [batch[field] for field in ("input_file_id", "output_file_id", "error_file_id")]
    return Belongings(files=[each for each in files if each], batches=[batch["id"]])


def begin_batch(api: Api, name: str, file_id: str) -> str:
    """Return the id of a batch that nothing runs yet."""
    body = {**_BATCH, "input_file_id": file_id, "metadata": {"whose": name}}
    answer = api.post("/v1/batches", body, headers=as_tenant(name))
    return str(answer.json()["id"])


async def _ended(api: Api, name: str, batch_id: str) -> dict[str, Any]:
    store = api.served.deps.batches
    assert store is not None
    running = asyncio.create_task(BatchRunner(api.served.deps, store).run())
    batch: dict[str, Any] = {"status": None}
    while batch["status"] not in ENDED:
        answer = await api.send("GET", f"/v1/batches/{batch_id}", headers=as_tenant(name))
        batch = answer.json()
    running.cancel()
    await asyncio.wait([running])
    return batch


def _lines(models: Sequence[str]) -> str:
    bodies = [{"model": model, "messages": USER, "max_tokens": 2} for model in models]
    line = {"method": "POST", "url": "/v1/chat/completions"}
    return "\n".join(
        json.dumps({"custom_id": f"line-{place}", **line, "body": body}) for place, body in enumerate(bodies)
    )


def _form(lines: str) -> dict[str, Any]:
    return {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", lines.encode())}}


class Reader:
    """Asks as one tenant. `own`, `others`: what it and others have stored."""

    def __init__(
        self,
        api: Api,
        name: str,
        folder: Path,
        *,
        own: Belongings | None = None,
        others: Belongings | None = None,
    ) -> None:
        self._api = api
        self._key = as_tenant(name)
        self._folder = folder
        self._own = own or Belongings()
        self._others = others or Belongings()
        self._document: dict[str, Any] = api.get("/openapi.json", headers=self._key).json()
        self.statuses: Counter[tuple[str, int]] = Counter()
        """Answers by method and path, as the document has it, and status."""

    @property
    def documented(self) -> set[str]:
        """The routes of the document, by method and path."""
        return {f"{method} {path}" for path, methods in self._document["paths"].items() for method in methods}

    def ask_all(
        self, is_asked: Callable[[str], bool] = lambda path: True
    ) -> list[tuple[str, httpx.Response]]:
        """Return the answers of every route, to good and bad requests, by what was asked. What deletes is
        asked last. `is_asked`: chooses among the routes."""
        asked = [
            (method, path)
            for path, methods in self._document["paths"].items()
            if is_asked(path)
            for method in dict.fromkeys((*methods, "delete", "head", "options"))
        ]
        asked.sort(key=lambda each: each[0] == "delete" or "unload" in each[1])
        found = [answer for method, path in asked for answer in self._ask(method, path)]
        for url in ("/docs", "/nothing", "/v1/fleet", "/v1/fleet/placement", "/openapi.json"):
            found.append((url, self._api.get(url, headers=self._key)))
        return found

    def _ask(self, method: str, path: str) -> Iterator[tuple[str, httpx.Response]]:
        operation = self._document["paths"][path].get(method, {})
        for url in self._urls(path):
            for options in self._options(operation):
                answer = self._api.request(method.upper(), url, headers=self._key, **options)
                self.statuses[f"{method} {path}", answer.status_code] += 1
                yield f"{method} {url} {options}", answer

    def _urls(self, path: str) -> list[str]:
        ids: Mapping[str, Sequence[str]] = {
            "{model_id}": MODELS,
            "{file_id}": (*self._own.files, *self._others.files, "file-0"),
            "{batch_id}": (*self._own.batches, *self._others.batches, "batch_0"),
        }
        for name, values in ids.items():
            if name in path:
                return [path.replace(name, value) for value in values]
        return [path]

    def _options(self, operation: Mapping[str, Any]) -> list[dict[str, Any]]:
        content = operation.get("requestBody", {}).get("content", {})
        if "multipart/form-data" in content:
            wrong = {"data": {"purpose": "globex"}, "files": {"file": ("globex", b"x")}}
            return [_form(_lines(MODELS)), wrong, {"json": {}}]
        if "application/json" not in content:
            return [{}]
        schema = content["application/json"]["schema"]
        schema = self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        required, known = set(schema.get("required", ())), schema["properties"].keys()
        fitting = [body for body in self._bodies() if required <= body.keys() <= known]
        assert fitting, f"give Reader._bodies what {schema['title']} needs"
        return [{"json": body} for body in (*fitting, {}, {**fitting[0], "nonsense": 1})]

    def _bodies(self) -> Iterator[dict[str, Any]]:
        """Yield bodies for any route: those that fit one are sent to it."""
        for prompt in ({"messages": USER}, {"prompt": "x"}, {"input": "x"}):
            few = {"max_output_tokens" if "input" in prompt else "max_tokens": 2}
            for model in MODELS:
                yield {"model": model, **prompt}
                yield {"model": model, **prompt, **few, "stream": True}
                yield {"model": "base", "adapter_id": model, **prompt, **few}
                yield {"model": model, "adapter_id": "acme-code", **prompt, **few}
        for model in MODELS:
            yield {"model": model, "prompt": "x", "max_tokens": 2, "n": 3, "logprobs": 1}
            yield {"model": model, "prompt": [1] * 5_000}
            yield {"model": model, "tokens": [5, 6]}
            tool = {"type": "function", "function": _FUNCTION}
            yield {"model": model, "messages": USER, "tools": [tool], "tool_choice": "required"}
            yield {"model": model, "input": "x", "tools": [{"type": "function", **_FUNCTION}]}
            yield {"lora_name": model}
            yield {"lora_name": model, "lora_path": "x"}
        for name, path in (
            ("acme-new", str(self._folder / "acme" / "new")),
            ("acme-new", str(self._folder / "globex" / "new")),
            ("acme-ne", "../globex/new"),
            ("acme-other", "new"),
            ("acme-other", "owner/repo"),
            ("acme-other", "acme/missing"),
        ):
            yield {"lora_name": name, "lora_path": path}
        for file_id in (*self._own.files[:1], *self._others.files, "file-0"):
            yield {"input_file_id": file_id, **_BATCH}
            yield {"input_file_id": file_id, **_BATCH, "metadata": {"model": "globe-chat"}}
        yield from ({"replica": 0}, {"replicas": 1}, {"replicas": [0], "adapters": []})


def check_answers(answers: list[tuple[str, httpx.Response]], others: Belongings | None = None) -> None:
    """Assert that none names anything of another tenant, or counts the requests of others. `others`: what
    others have stored, which is not there for this tenant."""
    ids = (*others.files, *others.batches) if others is not None else ()
    for asked, answer in answers:
        read = answer.text + str(answer.headers)
        for name in (*OTHERS, *ids):
            assert name in asked or name not in read, (asked, answer.text)
        assert "adapter_requests_total" not in read
        if any(each in asked for each in ids):
            assert answer.status_code in (404, 405), (asked, answer.text)
