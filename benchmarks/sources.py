"""The code that each result depends on, and whether it has changed since the result was measured.

A script that writes a result stores a fingerprint of every source path listed here for it, under `sources`.
`benchmarks.make_tables` compares these with the current code. Fingerprints need no git history, so they work
in shallow clones, in archives and after commits were squashed.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
_DIGEST_CHARS: Final = 16

_CHECKS: Final = "benchmarks/correctness"
_STEP: Final = ("loraplex/core", "loraplex/kernels", "loraplex/model")
"""Code that computes a forward pass."""
_ENGINE_COSTS: Final = "loraplex/perf without twins"
_ADAPTERS: Final = "loraplex/adapters without registry"
_BESIDE_ENGINE: Final = (_ADAPTERS, _ENGINE_COSTS, "loraplex/scheduling")
_ENGINE: Final = (*_STEP, *_BESIDE_ENGINE, "loraplex/engine")
_TOKEN_ENGINE: Final = "loraplex/engine without text"
_UNASSISTED_ENGINE: Final = "loraplex/engine without text and CPU workers"
_FLEET_TWIN: Final = "loraplex/twin without recorded runs and commands"
_AUTO_MODULES: Final = ("routers/auto.py", "placements/rank_line.py")
AUTO: Final = tuple(f"loraplex/fleet/{name}" for name in _AUTO_MODULES)
"""The modules of our own policy: no run of another policy depends on them."""
_OTHER_POLICIES: Final = "loraplex/fleet without auto"
_TEXT_MODULES: Final = (
    *("detokenizer.py", "prompt_encoder.py", "prompt_offsets.py"),
    *("stop_strings.py", "text_engine.py", "tokenizer.py"),
)
_PARTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    # Checks on a GPU compare token ids and logits. Tokenizing and detokenizing run on a CPU anywhere, and are
    # tested in CI; a change there must not outdate what a GPU computed.
    _TOKEN_ENGINE: ("loraplex/engine", _TEXT_MODULES),
    # Engines do not depend on how a server registers its adapters.
    _ADAPTERS: ("loraplex/adapters", ("registry.py", "registry_database.py", "server_mark.py")),
    # Costs that only twins and fleets use; no engine imports these modules.
    _ENGINE_COSTS: (
        "loraplex/perf",
        ("profile_figures.py", "set_costs.py"),
    ),
    # A simulated fleet neither reads recorded runs nor depends on what commands do with its outcome.
    _FLEET_TWIN: (
        "loraplex/twin",
        (
            *("calibrate.py", "compare.py", "first_guess.py", "fleet_compare.py", "predict_run.py"),
            *("recorded_runs.py", "run_workload.py", "scores.py", "validate.py", "worker_pool.py"),
        ),
    ),
    # Fleets of the published runs admit every request.
    _OTHER_POLICIES: (
        "loraplex/fleet",
        (*_AUTO_MODULES, "admission.py", "first_token.py", "waiting_room.py"),
    ),
    # Only the section `cold` starts CPU workers.
    _UNASSISTED_ENGINE: ("loraplex/engine", (*_TEXT_MODULES, "assist")),
}
"""Name of a part -> its folder, and the files and folders in it that do not belong to the part."""
_SHARED_CHECKS: Final = ("check", "checkpoints", "comparing", "driving", "random_engines")
"""Modules of the checks that several sections use."""
_TIMED_ENGINE: Final = (*_ENGINE, "loraplex/bench/engine_scenarios.py")
_COMMAND: Final = tuple(f"loraplex/cli/{name}.py" for name in ("main", "serve", "serve_options", "sizes"))
"""The modules of `loraplex serve`; the other commands are not part of a server."""
_SERVER: Final = (*_ENGINE, "loraplex/server", *_COMMAND)
_HTTP: Final = ("benchmarks/http_servers.py", "benchmarks/http_client.py", "benchmarks/preloaded.py")
"""Code that starts and loads the servers of the HTTP comparison: all of ours that affects vLLM's figures."""
_BESIDE_TWIN: Final = ("loraplex/scheduling", _ADAPTERS, "loraplex/perf")
_TWIN: Final = (*_BESIDE_TWIN, "loraplex/twin")
_SIMULATED_FLEET: Final = (*_BESIDE_TWIN, _FLEET_TWIN, _OTHER_POLICIES, *AUTO, "loraplex/workload")
_SURROGATES: Final = (
    *(f"loraplex/planner/{name}.py" for name in ("capacity", "dataset", "features", "grid", "searches")),
    *(f"loraplex/planner/{name}.py" for name in ("surrogate", "training", "traffic", "trees")),
    *(f"benchmarks/planner_{name}.py" for name in ("data", "surrogates")),
)
_PLANNER: Final = (
    *(f"loraplex/planner/{name}.py" for name in ("headroom", "make", "queued", "steady_state", "trial")),
    "loraplex/planner/packing",
    *(f"benchmarks/planner_{name}.py" for name in ("packing", "scenarios")),
)


_STRUCTURED: Final = (
    *("loraplex/engine/grammars.py", "loraplex/engine/schema_rules.py"),
    "benchmarks/structured_output.py",
)


def _engine_checks(*names: str, engine: str = _UNASSISTED_ENGINE) -> tuple[str, ...]:
    """Return the sources of a section that checks whole engines with these modules."""
    return (*_STEP, *_BESIDE_ENGINE, engine, *(f"{_CHECKS}/{name}.py" for name in (*_SHARED_CHECKS, *names)))


SPEAKS_FOR: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gpu_correctness.json": {
        "kernels": (
            "loraplex/core",
            "loraplex/kernels",
            "loraplex/engine/cuda/device_sampler.py",
            "loraplex/engine/cuda/small_copies.py",
            "loraplex/engine/draws.py",
            *(f"{_CHECKS}/{name}.py" for name in ("kernels", "kernel_attention", "kernel_batch")),
            *(f"{_CHECKS}/{name}.py" for name in ("kernel_lora", "kernel_rows", "check")),
        ),
        "collective": (*_STEP, "loraplex/engine/cuda", f"{_CHECKS}/collective.py", f"{_CHECKS}/check.py"),
        "adapters": _engine_checks("adapters", "families"),
        **{
            name: _engine_checks(name)
            for name in ("families", "batch", "graphs", "endurance", "burst", "bad_adapter", "swapping")
        },
        "merging": _engine_checks("merging", "kernel_lora"),
        "*": _engine_checks("cold", engine=_TOKEN_ENGINE),
    },
    "gpu_engine.json": {
        "kernels": ("loraplex/kernels", "loraplex/bench/kernel_scenarios.py"),
        "attention": ("loraplex/kernels",),
        "prompt_attention": ("loraplex/kernels",),
        "decode_attention": ("loraplex/kernels",),
        "*": _TIMED_ENGINE,
    },
    "step_profile.json": {"*": _TIMED_ENGINE},
    "gpu_cold.json": {"*": (*_TIMED_ENGINE, "loraplex/bench/cold_scenarios.py")},
    "slow_bus.json": {"*": (*_TIMED_ENGINE, "loraplex/bench/cold_scenarios.py")},
    "twin_slow_bus.json": {"*": (*_BESIDE_TWIN, _FLEET_TWIN, "benchmarks/twin_slow_bus.py")},
    "assist.json": {"*": ("loraplex/engine/assist", "loraplex/kernels/cpu")},
    "cpu_kernels.json": {"*": ("loraplex/kernels/cpu", "loraplex/model")},
    "cpu_serve.json": {"*": _SERVER},
    "cpu_serve_05b.json": {"*": _SERVER},
    "peer_tuning_05b.json": {"*": ()},
    "cpu_kernels_05b.json": {"*": ("loraplex/kernels/cpu", "loraplex/model")},
    "waiting_queue.json": {"*": ("loraplex/scheduling",)},
    "structured_libraries.json": {"*": _STRUCTURED},
    "structured_steps.json": {"*": (*_ENGINE, "benchmarks/structured_output.py")},
    "structured_gpu.json": {
        "*": (*_ENGINE, "benchmarks/structured_output.py", "benchmarks/structured_gpu.py")
    },
    "holdups.json": {
        "*": (
            "loraplex/server",
            "loraplex/scheduling",
            *(f"loraplex/engine/{name}" for name in ("request_checks.py", *_TEXT_MODULES)),
        )
    },
    "fleet_front.json": {"*": ("loraplex/server", "loraplex/fleet")},
    "vllm_answers.json": {"*": ("loraplex/server/fleet", "tests/server/fleet/vllm_dialect.py")},
    "fleet_vllm.json": {"*": ("loraplex/server/fleet", "loraplex/fleet")},
    **{
        f"overload{setting}.json": {"*": (*_SERVER, "loraplex/fleet")}
        for setting in ("", "_tenants", "_fleet")
    },
    "fleet_kills.json": {"*": (*_SERVER, "loraplex/fleet")},
    "fleet_versions.json": {"*": (*_SERVER, "loraplex/fleet")},
    "fleet_live.json": {"*": (*_SERVER, "loraplex/fleet", "loraplex/twin")},
    "shared_cpu.json": {"*": ("loraplex/engine", "loraplex/kernels/cpu", _ENGINE_COSTS)},
    "gpu_start.json": {"*": _SERVER},
    "http_compare.json": {
        **{f"{server}{shape}": _HTTP for server in ("vllm", "vllm-lora") for shape in ("", " llama-3-8b")},
        "*": (*_SERVER, *_HTTP),
    },
    "twin_validation.json": {
        "authors": ("loraplex/twin/scores.py", "loraplex/twin/recorded_runs.py"),
        "held_out": ("loraplex/perf", "loraplex/twin"),
        "halves": ("loraplex/perf", "loraplex/twin"),
        "*": _TWIN,
    },
    "fleet.json": {
        "decisions": ("loraplex/fleet", "loraplex/perf/set_costs.py"),
        "*": _SIMULATED_FLEET,
    },
    "policies.json": {
        "*": (
            *_BESIDE_TWIN,
            _FLEET_TWIN,
            "loraplex/workload",
            *(f"benchmarks/policy_{name}.py" for name in ("loads", "queues", "starts", "twin", "victims")),
        )
    },
    "batching.json": {"*": (*_BESIDE_TWIN, _FLEET_TWIN, "loraplex/workload", "benchmarks/batching.py")},
    "gpu_batching.json": {"*": (*_TIMED_ENGINE, "benchmarks/batching.py", "benchmarks/gpu_batching.py")},
    "planner.json": {
        "own": (*_BESIDE_TWIN, _FLEET_TWIN, "loraplex/planner/traffic.py", *_PLANNER),
        **dict.fromkeys(
            ("surrogates", "rows", "rules", "recorded"), ("loraplex/perf", "loraplex/twin", *_SURROGATES)
        ),
        "*": ("loraplex/perf", "loraplex/twin", *_SURROGATES, *_PLANNER),
    },
    "fairness.json": {"*": (*_BESIDE_TWIN, _FLEET_TWIN, "loraplex/fleet", "benchmarks/fairness.py")},
    "quick_profile.json": {"*": (*_ENGINE, "loraplex/bench/profile_scenarios.py")},
    "quotas.json": {"*": ("loraplex/server/tenants", "loraplex/server/generation_routes.py")},
    "kv_swap.json": {"*": (*_BESIDE_TWIN, _FLEET_TWIN, "loraplex/workload")},
    "twin_engine_cuda.json": {"*": (*_TWIN, "loraplex/engine", "loraplex/kernels")},
    "twin_engine_cpu.json": {"*": (*_TWIN, "loraplex/engine", "loraplex/kernels")},
}
"""Result file -> section -> source files, folders and parts. `*`: every section that is not named."""


def paths_of(file: str, section: str = "*") -> tuple[str, ...]:
    """Return the sources that a section of a result file depends on."""
    sections = SPEAKS_FOR[file]
    return sections.get(section, sections["*"])


def fingerprints(file: str, section: str = "*", *, root: Path = ROOT) -> dict[str, str]:
    """Return what a script stores as `sources` beside its figures: path -> current fingerprint."""
    return {path: fingerprint(path, root=root) for path in paths_of(file, section)}


def sections(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a result file that were measured separately, by name; `*` is the whole file.

    For a file that keeps every measurement, yields the latest.
    """
    if "git_commit" in document:
        yield "*", document
    elif "measurements" in document:
        yield "*", document["measurements"][-1]
    else:
        yield from document.items()


def changed_since(
    measured: Mapping[str, Any], file: str, section: str = "*", *, root: Path = ROOT
) -> list[str] | None:
    """Return the paths whose code differs from what was measured; None if the result has no fingerprints.

    A path without a fingerprint in the result counts as changed: the list has grown since.
    """
    recorded = measured.get("sources")
    if recorded is None:
        return None
    now = fingerprints(file, section, root=root)
    return [path for path, digest in now.items() if recorded.get(path) != digest]


@cache
def fingerprint(path: str, *, root: Path = ROOT) -> str:
    """Return a hash of a Python file, or of all files in a folder or part of one, without comments,
    docstrings and blank lines.

    The code is hashed as text, not as a syntax tree: trees differ between versions of Python, and a result is
    often checked under another version than it was measured under.
    """
    folder, names_left_out = _PARTS.get(path, (path, ()))
    start = root / folder
    files = [start] if start.is_file() else sorted(start.rglob("*.py"))
    left_out = [start / name for name in names_left_out]
    if not files or not all(name.exists() for name in left_out):
        raise FileNotFoundError(f"a source file of {path} is gone; benchmarks/sources.py lists it")
    files = [file for file in files if not any(file.is_relative_to(name) for name in left_out)]
    digest = hashlib.sha256()
    for file in files:
        code = _code(file.read_text(encoding="utf-8"))
        digest.update(f"{file.relative_to(root).as_posix()}\n{len(code)}\n{code}\n".encode())
    return digest.hexdigest()[:_DIGEST_CHARS]


@cache  # many parts contain the same files
def _code(source: str) -> str:
    return "\n".join(_code_lines(source))


def _code_lines(source: str) -> Iterable[str]:
    skipped = _docstring_lines(source)
    comment_at = _comment_columns(source) if "#" in source else {}
    for number, line in enumerate(source.split("\n"), start=1):
        code = line[: comment_at.get(number, len(line))].rstrip()
        if code and number not in skipped:
            yield code


def _docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in _with_statements(ast.parse(source)):
        for previous, statement in _statements(node):
            # A string after an assignment documents the name; any other one is code without effect.
            if previous is None or isinstance(previous, ast.Assign | ast.AnnAssign):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def _with_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes that may hold statements, which expressions, the bulk of nodes, cannot."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _with_statements(child)


def _statements(node: ast.AST) -> Iterable[tuple[ast.stmt | None, ast.Expr]]:
    """Yield the statements that consist of a string only, each with the statement before it."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    previous: ast.stmt | None = None
    for statement in node.body:
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield previous, statement
        previous = statement


def _comment_columns(source: str) -> dict[int, int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.start[1] for token in tokens if token.type == tokenize.COMMENT}
