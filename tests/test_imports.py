"""Importing a package drags in little: deciding code stays free of tensors, the engine of web servers."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_THEN_LIST = (
    "import importlib, pkgutil, sys\n"
    "for package in sys.argv[1].split(','):\n"
    "    module = importlib.import_module(package)\n"
    "    for found in pkgutil.walk_packages(module.__path__, package + '.'):\n"
    "        importlib.import_module(found.name)\n"
    "print(*sys.modules, sep='\\n')\n"
)


def modules_after_importing(packages: str) -> set[str]:
    command = [sys.executable, "-c", IMPORT_THEN_LIST, packages]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name.partition(".")[0] for name in listed.splitlines()}


def test_deciding_code_imports_no_tensors() -> None:
    packages = ",".join(
        f"loraplex.{name}" for name in ("core", "scheduling", "adapters", "perf", "workload", "fleet")
    )
    loaded = modules_after_importing(packages)
    assert loaded.isdisjoint({"torch", "triton", "ray", "numba", "transformers"})


def test_workloads_import_neither_web_servers_nor_plots() -> None:
    loaded = modules_after_importing("loraplex.workload")
    assert loaded.isdisjoint({"torch", "ray", "fastapi", "msgspec", "matplotlib", "typer", "rich"})


def test_the_twin_imports_no_device_and_no_cluster() -> None:
    loaded = modules_after_importing("loraplex.twin,loraplex.planner")
    assert "loraplex" in loaded
    assert loaded.isdisjoint({"torch", "triton", "ray", "transformers", "fastapi", "matplotlib"})


def test_the_engine_imports_no_web_server() -> None:
    loaded = modules_after_importing("loraplex.engine,loraplex.model,loraplex.kernels,loraplex.bench")
    assert "torch" in loaded
    assert loaded.isdisjoint({"fastapi", "pydantic", "uvicorn", "starlette", "zmq", "msgspec", "ray"})


def test_a_cpu_is_profiled_without_triton() -> None:
    """It is not installed where there is no GPU, but for developers."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from loraplex.bench import profile_scenarios\n"
        "from loraplex.bench.step_cases import CaseLimits\n"
        "from loraplex.scheduling.work import StepWork\n"
        "limits = CaseLimits(on_gpu=False, max_context=512, max_tokens=4000, work=StepWork())\n"
        "print(len(limits.prompts))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(done.stdout) > 0, done.stderr


@pytest.mark.parametrize("name", ["loraplex", "loraplex.engine", "loraplex.kernels", "loraplex.model"])
def test_package_facades_are_light(name: str) -> None:
    listed = subprocess.run(
        [sys.executable, "-c", f"import sys, {name}; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert "torch" not in listed


def test_a_server_starts_its_engine_before_it_imports_transformers() -> None:
    """That takes seconds, in which the engine process can start."""
    code = "import sys, loraplex.server.run, loraplex.cli.serve; print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert {"loraplex.server.engine_client", "loraplex.engine.tokenizer"} <= set(listed.split())
    assert {"torch", "transformers"}.isdisjoint(listed.split())


def test_an_engine_process_listens_before_it_imports_what_only_its_engine_needs() -> None:
    code = "import sys, loraplex.server.engine_process; print(*sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert {"asyncio", "numpy", "torch"}.isdisjoint(listed.split())


def test_the_facade_offers_llm_and_sampling_params() -> None:
    import loraplex
    from loraplex.engine.llm import LLM

    assert loraplex.LLM is LLM
    assert loraplex.SamplingParams(max_tokens=3).max_tokens == 3
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        loraplex.nothing  # noqa: B018
