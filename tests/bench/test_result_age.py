"""Results are held against the code they were measured on."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks", reason="the scripts are only in a checkout")

from benchmarks import gpu_tables, make_tables, sources

CODE = '''"""A module."""
LIMIT = 3
"""How many."""


def twice(value: int) -> int:
    """Return it doubled."""
    return 2 * value  # exact
'''


def fingerprint(tmp_path: Path, code: str) -> str:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    (root / "package").mkdir(parents=True)
    (root / "package" / "module.py").write_text(code)
    return sources.fingerprint("package", root=root)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A module.", "The module.\n\nIn two paragraphs."),
        ("How many.", "So many."),
        ("Return it doubled.", "Return two times the value."),
        ("  # exact", "  # a multiplication"),
        ("    return", "    # Integers do not overflow.\n\n    return"),
    ],
)
def test_words_about_the_code_do_not_count(tmp_path: Path, old: str, new: str) -> None:
    assert fingerprint(tmp_path, CODE) == fingerprint(tmp_path, CODE.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 3", "LIMIT = 4"), ("2 * value", "2 * abs(value)")])
def test_code_counts(tmp_path: Path, old: str, new: str) -> None:
    assert fingerprint(tmp_path, CODE) != fingerprint(tmp_path, CODE.replace(old, new))


def test_a_string_that_is_a_value_counts(tmp_path: Path) -> None:
    code = 'def greet():\n    return """\n# hello\n"""\n'
    assert fingerprint(tmp_path, code) != fingerprint(tmp_path, code.replace("# hello", "# goodbye"))


def test_a_file_that_is_added_or_renamed_counts(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    (root / "package").mkdir(parents=True)
    (root / "package" / "one.py").write_text(CODE)
    first = sources.fingerprint("package", root=root)
    sources.fingerprint.cache_clear()
    (root / "package" / "one.py").rename(root / "package" / "two.py")
    assert sources.fingerprint("package", root=root) != first


@pytest.mark.slow
def test_every_table_says_which_code_it_speaks_for() -> None:
    files = {file for each in make_tables.TABLES.values() for file in each.files}
    assert files <= sources.SPEAKS_FOR.keys()
    for file, sections in sources.SPEAKS_FOR.items():
        assert "*" in sections, file
        for section in sections:
            sources.fingerprints(file, section)  # raises where a path is gone


def section(**changes: str) -> dict[str, Any]:
    recorded = sources.fingerprints("gpu_correctness.json", "adapters") | changes
    checks = [{"passed": True}, {"passed": True}]
    about = {"date": "2026-01-02T03:04:05", "git_commit": "abc", "passed": True, "checks": checks}
    return {**about, "sources": recorded}


def test_checks_that_ran_on_the_code_as_it_is_count_as_passed() -> None:
    assert "| adapters | 2 of 2 | 2026-01-02 | abc |" in gpu_tables.correctness_table({"adapters": section()})


def test_checks_that_are_older_than_their_code_are_refused() -> None:
    table = gpu_tables.correctness_table({"adapters": section(**{"loraplex/kernels": "before"})})
    assert "| adapters | **not run** since `loraplex/kernels` changed | 2026-01-02 | abc |" in table
    assert "2 of 2" not in table


@pytest.mark.slow
def test_checks_of_ids_do_not_age_with_the_code_that_handles_texts(tmp_path: Path) -> None:
    [part] = [path for path in sources.paths_of("gpu_correctness.json") if path.startswith("loraplex/engine")]
    engine = shutil.copytree(sources.ROOT / "loraplex" / "engine", tmp_path / "loraplex" / "engine")

    def fingerprint() -> str:
        sources.fingerprint.cache_clear()
        return sources.fingerprint(part, root=tmp_path)

    first = fingerprint()
    assert first == sources.fingerprint(part)
    for name in (
        "detokenizer",
        "prompt_encoder",
        "prompt_offsets",
        "stop_strings",
        "text_engine",
        "tokenizer",
    ):
        (engine / f"{name}.py").write_text("CHANGED = True\n")
    assert fingerprint() == first
    (engine / "core.py").write_text("CHANGED = True\n")
    assert fingerprint() != first
    (engine / "tokenizer.py").rename(engine / "tokens.py")
    with pytest.raises(FileNotFoundError, match="is gone"):
        fingerprint()


@pytest.mark.parametrize("file", ["cpu_serve.json", "gpu_start.json", "http_compare.json"])
def test_results_of_servers_speak_for_the_command_that_starts_them(file: str) -> None:
    assert "loraplex/cli/serve.py" in sources.paths_of(file)


@pytest.mark.parametrize("section", ["vllm", "vllm-lora", "loraplex", "starts"])
def test_every_server_of_the_http_comparison_speaks_for_how_it_is_started_and_loaded(section: str) -> None:
    paths = sources.paths_of("http_compare.json", section)
    assert {"benchmarks/http_servers.py", "benchmarks/http_client.py"} <= set(paths)


def test_checks_that_do_not_say_what_they_ran_are_of_unknown_age() -> None:
    old = {key: value for key, value in section().items() if key != "sources"}
    assert "2 of 2, of unknown age" in gpu_tables.correctness_table({"adapters": old})


def test_speed_results_are_named_with_what_changed_since(tmp_path: Path) -> None:
    code = sources.fingerprints("assist.json")
    old = {"date": "2026-01-02", "git_commit": "abc", "sources": code | {"loraplex/kernels/cpu": "before"}}
    (tmp_path / "assist.json").write_text(json.dumps(old))
    assert list(make_tables.outdated(tmp_path)) == [
        "assist.json (all at abc): since then, loraplex/kernels/cpu changed"
    ]


@pytest.mark.slow
def test_check_fails_where_a_document_is_not_what_the_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- table:cpu-limits -->\n999 MB\n<!-- /table:cpu-limits -->\n")

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["make_tables", str(document), *arguments])
        make_tables.main()

    with pytest.raises(SystemExit, match=r"page\.md; run python -m benchmarks\.make_tables"):
        run("--check")
    run()
    run("--check")
    assert "999 MB" not in document.read_text()


def test_engines_import_no_costs_that_their_results_leave_out() -> None:
    folder, left_out = sources._PARTS[sources._ENGINE_COSTS]
    package = folder.replace("/", ".")
    code = (
        "import sys, loraplex.engine.cpu_build, loraplex.engine.cuda.build, loraplex.server.run\n"
        f"print([name for name in sys.modules if name.startswith({package!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = ast.literal_eval(done.stdout)
    assert f"{package}.cost_model" in imported
    assert not {f"{package}.{name.removesuffix('.py')}" for name in left_out} & set(imported)
