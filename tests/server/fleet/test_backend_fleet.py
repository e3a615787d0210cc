"""`loraplex fleet serve --backend`: real servers behind a real front, a tiny model, the openai client."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import openai
from server_process import replicas, run_command

MODELS = ("tiny", "one", "two")


def answer(url: str, model: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return client.completions.create(model=model, prompt="w5 w6 w7", max_tokens=12, **options)


def test_servers_behind_a_front_answer_as_they_do_alone(front: str, single: str) -> None:
    for model in MODELS:
        for options in ({"temperature": 0, "logprobs": 2}, {"temperature": 1.0, "seed": 7, "n": 2}):
            found, expected = answer(front, model, **options), answer(single, model, **options)
            assert [choice.text for choice in found.choices] == [choice.text for choice in expected.choices]
            assert found.usage == expected.usage
    assert sum(row["sent"] > 0 for row in replicas(front)) > 1, "one server did all of it"


def test_bad_backends_are_refused_in_words(folder: Path, single: str, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")

    def refused(*options: str) -> str:
        start = ("fleet", "serve", "--model", str(other), "--port", "0")
        found = run_command(*start, *options, LORAPLEX_STATE=str(tmp_path / "state"))
        assert found.returncode in (1, 2)
        return found.stderr

    assert "is no address of a server" in refused("--backend", "somewhere")
    assert "nothing answers at http://127.0.0.1:9" in refused("--backend", "http://127.0.0.1:9")
    assert "serves the base model 'tiny'" in refused("--backend", single)
    assert "is given twice with --backend" in refused("--backend", single, "--backend", f"{single}/")
    assert "give one of both" in refused("--backend", single, "--replicas", "2")
    told = " ".join(refused("--replicas", "1", "--backend-max-adapters", "4").split())
    assert "name them with --backend, or leave it out" in told
