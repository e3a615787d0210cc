from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_openai import FakeServer
from typer.testing import CliRunner

from loraplex.cli.bench import app

CLOSED = ("--requests", "6", "--concurrency", "2", "--prompt-tokens", "5", "--output-tokens", "3")


def bench(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *map(str, args)], env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def test_closed_loop_reports_and_writes_json_and_plot(fake: FakeServer, tmp_path: Path) -> None:
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    code, text = bench(
        "--base-url", fake.base_url, *CLOSED, "--adapters", "a,b", "--warmup", 2, "--json", out, "--plot", png
    )
    assert code == 0, text
    assert "6 of 6 requests succeeded" in text
    assert [body["model"] for body in fake.bodies].count("a") == 4  # 3 of 6, and 1 of 2 warm-ups
    assert {len(body["prompt"]) for body in fake.bodies} == {5}
    assert png.read_bytes().startswith(b"\x89PNG")
    result = json.loads(out.read_text())
    assert result["result"]["num_requests"] == 6
    assert result["result"]["output_tokens"] == 18
    assert result["parameters"]["adapters"] == ["a", "b"]
    assert {"date", "machine", "python", "packages", "git_commit"} <= result.keys()
    assert str(tmp_path) not in out.read_text()


def test_without_adapters_the_base_model_is_asked(fake: FakeServer) -> None:
    code, text = bench("--base-url", fake.base_url, *CLOSED)
    assert code == 0, text
    assert {body["model"] for body in fake.bodies} == {"the-base"}


def test_model_option_saves_the_look_up(fake: FakeServer) -> None:
    fake.models = []
    code, text = bench("--base-url", fake.base_url, *CLOSED, "--model", "mine", "--api-key", "k")
    assert code == 0, text
    assert {body["model"] for body in fake.bodies} == {"mine"}
    assert fake.headers[0]["Authorization"] == "Bearer k"


def test_equal_seeds_send_equal_prompts(fake: FakeServer) -> None:
    for seed in (1, 1, 2):
        bench("--base-url", fake.base_url, *CLOSED, "--concurrency", 1, "--seed", seed)
    prompts = [body["prompt"] for body in fake.bodies]
    assert prompts[:6] == prompts[6:12]
    assert prompts[:6] != prompts[12:]


def test_warm_up_prompts_are_not_measured_prompts(fake: FakeServer) -> None:
    bench("--base-url", fake.base_url, *CLOSED, "--concurrency", 1, "--warmup", 6)
    prompts = [tuple(body["prompt"]) for body in fake.bodies]
    assert not set(prompts[:6]) & set(prompts[6:])


def test_workload_is_replayed_with_its_lengths(fake: FakeServer, tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0.001 * index, "prompt_tokens": 3 + index, "output_tokens": 2, "adapter": index}
        for index in range(4)
    ]
    path, out = tmp_path / "w.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, lines)))
    code, text = bench("--base-url", fake.base_url, "--workload", path, "--adapters", "a,b,c", "--json", out)
    assert code == 0, text
    asked = {(body["model"], len(body["prompt"])) for body in fake.bodies}
    assert asked == {("a", 3), ("b", 4), ("c", 5), ("a", 6)}
    parameters = json.loads(out.read_text())["parameters"]
    assert (parameters["loop"], parameters["workload"]) == ("open", "w.jsonl")


def test_failed_requests_exit_1_and_show_the_error(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = bench("--base-url", fake.base_url, *CLOSED, "--adapters", "a,refuse", "--json", out)
    assert code == 1
    assert "3 of 6 requests succeeded" in text
    assert "HTTP 404: no such model" in text
    assert json.loads(out.read_text())["result"]["errors"] == {"HTTP 404: no such model": 3}


def test_a_failed_warm_up_ends_the_run(fake: FakeServer) -> None:
    code, text = bench("--base-url", fake.base_url, *CLOSED, "--adapters", "refuse", "--warmup", 2)
    assert code == 1
    assert "2 warm-up requests failed: HTTP 404: no such model" in text
    assert len(fake.bodies) == 2


def test_adapters_that_are_not_there_end_the_run_before_its_first_request(fake: FakeServer) -> None:
    fake.models = [{"id": "the-base"}, {"id": "refused", "parent": "the-base"}]
    code, text = bench("--base-url", fake.base_url, *CLOSED, "--adapters", "refused,unlisted,refuse")
    assert code == 1
    assert "there is no adapter 'refuse'; did you mean refused? (HTTP 404: no such model)" in text
    assert [body["model"] for body in fake.bodies] == ["unlisted", "refuse"]


def test_no_server_exits_1() -> None:
    code, text = bench("--base-url", "http://127.0.0.1:9", *CLOSED)
    assert code == 1
    assert "error: no server answers at http://127.0.0.1:9 ([Errno " in text
    code, text = bench("--base-url", "http://127.0.0.1:9", *CLOSED, "--model", "m")
    assert code == 1
    assert "0 of 6 requests succeeded" in text
    assert "failed 6x: no server answers at http://127.0.0.1:9 ([Errno " in text


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ((), "--workload"),
        (("--requests", "5"), "--concurrency"),
        (("--workload", "w.jsonl", "--requests", "5"), "--requests"),
        (("--workload", "absent.jsonl"), "absent.jsonl"),
        ((*CLOSED, "--requests", "0"), "--requests"),
        ((*CLOSED, "--adapters", "a,,b"), "--adapters"),
        ((*CLOSED, "--json", "no/such/folder/out.json"), "--json"),
        ((*CLOSED, "--plot", "no/such/folder/out.png"), "--plot"),
        ((*CLOSED, "--plot", "out.pdf"), "out.pdf is no .png"),
        ((*CLOSED, "--base-url", "127.0.0.1:8000"), "--base-url"),
    ],
)
def test_bad_usage_exits_2_and_names_the_option(args: tuple[str, ...], hint: str) -> None:
    code, text = bench("--base-url", "http://127.0.0.1:9", *args)
    assert code == 2
    assert hint in text


def test_a_bad_workload_line_exits_2_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text("{}\n")
    code, text = bench("--base-url", "http://127.0.0.1:9", "--workload", path)
    assert code == 2
    assert "w.jsonl:1" in text.replace("\n", "")


def test_help_says_what_exit_codes_mean() -> None:
    code, text = bench("--help")
    assert code == 0
    assert "Exit code 1" in text
