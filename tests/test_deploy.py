"""Files of deploy/: what they copy exists, what they run are our commands, and their schemas accept them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from loraplex.cli import fleet_live, serve
from loraplex.cli.main import app
from loraplex.server.health import LIVE_PATH, READY_PATHS
from loraplex.server.run import ServeOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
MANIFESTS = [path for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if path.stem != "kustomization"]
ENDS_AFTER_S = 20
"""Seconds after its grace that a server may need to end; see docs/operations.md."""


class Instruction(NamedTuple):
    name: str
    words: list[str]


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.append(Instruction(name, json.loads(rest) if rest.startswith("[") else shlex.split(rest)))
    return found


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets a file or folder into the build's context; its last match counts."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(path, line.lstrip("!")):
            sent = line.startswith("!")
    return sent


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def workloads() -> dict[str, dict[str, Any]]:
    return {
        each["metadata"]["name"]: each["spec"] for each in documents() if "template" in each.get("spec", {})
    }


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options of servers that commands would have started, all of them checked."""
    found: list[ServeOptions] = []
    for module in (serve, fleet_live):
        monkeypatch.setattr(module, "run_server", lambda options, *_: found.append(options))
    return found


def options_of(args: list[str], started: list[ServeOptions], **environment: str) -> ServeOptions:
    done = CliRunner().invoke(app, args, env=environment)
    assert done.exit_code == 0, done.output
    return started.pop()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_from_files_that_exist(path: Path) -> None:
    known = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
    steps = instructions(path)
    assert {step.name for step in steps} <= known
    stages = {step.words[2] for step in steps if step.name == "FROM" and "AS" in step.words}
    copied = []
    for step in steps:
        if step.name == "COPY" and step.words[0].startswith("--from="):
            assert step.words[0].removeprefix("--from=") in stages
        elif step.name == "COPY":
            copied += step.words[:-1]
    assert {"pyproject.toml", "loraplex", "README.md", "LICENSE", "constraints.txt"} == set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert is_sent(source)
    assert not is_sent(".git")
    assert not is_sent("tests")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_our_command_as_nobody_special(path: Path) -> None:
    last = {step.name: step.words for step in instructions(path)}
    assert last["ENTRYPOINT"] == ["loraplex"]
    assert CliRunner().invoke(app, last["CMD"]).exit_code == 0
    assert int(last["USER"][0]) > 0
    [extras] = [word for step in instructions(path) for word in step.words if word.startswith(".[")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"].keys() == {"loraplex"}
    assert set(extras[2:-1].split(",")) <= project["optional-dependencies"].keys()


def test_the_instructions_are_read_as_docker_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text('# one\nRUN a && \\\n    # two\n    b\nCMD ["x", "y z"]\n')
    assert instructions(path) == [("RUN", ["a", "&&", "b"]), ("CMD", ["x", "y z"])]


def test_kubernetes_starts_servers_that_our_commands_accept(started: list[ServeOptions]) -> None:
    found = workloads()
    engines = found["loraplex-engine"]
    for name, spec in found.items():
        pod = spec["template"]["spec"]
        [container] = pod["containers"]
        options = options_of(container["args"], started)
        assert options.host == "0.0.0.0"
        assert options.shutdown_grace_s + ENDS_AFTER_S <= pod["terminationGracePeriodSeconds"]
        assert container["livenessProbe"]["httpGet"]["path"] == LIVE_PATH
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["path"] in READY_PATHS
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claimed = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        assert mounts.keys() == claimed | {volume["name"] for volume in pod["volumes"]}
        assert {str(each) for each in (*options.adapter_dirs, *options.allow_adapter_dirs)} == {
            mounts["adapters"]
        }
        uid = pod["securityContext"]["runAsUser"]
        assert all(
            ["USER", [str(uid)]] == list(step)
            for path in DOCKERFILES
            for step in instructions(path)
            if step.name == "USER"
        )
        if name == "loraplex-front":
            assert options.backends is not None
            hosts = [
                f"http://{engines['serviceName']}-{n}.{engines['serviceName']}:8000"
                for n in range(engines["replicas"])
            ]
            assert list(options.backends.urls) == hosts, "each engine by its own name"


def test_the_engines_of_kubernetes_answer_to_the_name_that_the_front_calls(
    started: list[ServeOptions],
) -> None:
    found = {
        name: options_of(spec["template"]["spec"]["containers"][0]["args"], started)
        for name, spec in workloads().items()
    }
    backends = found["loraplex-front"].backends
    assert backends is not None
    [allowed] = found["loraplex-engine"].allowed_hosts
    assert all(fnmatch(url.split("//")[1].split(":")[0], allowed) for url in backends.urls)


def test_variables_of_kubernetes_are_those_of_options() -> None:
    for spec in workloads().values():
        [container] = spec["template"]["spec"]["containers"]
        command = container["args"][: 2 if container["args"][0] == "fleet" else 1]
        environment = {each["name"]: "secret" for each in container["env"]}
        done = CliRunner().invoke(app, ["config", "show", "--json", *command, "m"], env=environment)
        origins = {row["from"] for row in json.loads(done.stdout)}
        assert {f"environment {name}" for name in environment} <= origins


def test_kubernetes_services_find_their_pods() -> None:
    labels = [spec["template"]["metadata"]["labels"] for spec in workloads().values()]
    services = [each for each in documents() if each["kind"] == "Service"]
    assert len(services) == 2
    for service in services:
        assert sum(service["spec"]["selector"].items() <= each.items() for each in labels) == 1
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in MANIFESTS]


@pytest.mark.slow
def test_kubernetes_schemas_accept_the_manifests() -> None:
    """Not installed with the others: `pip install kubernetes-validate` brings 100 MB of schemas."""
    schemas = pytest.importorskip("kubernetes_validate")
    for document in documents():
        schemas.validate(document, "1.36", strict=True)


def test_the_service_runs_what_its_file_says(started: list[ServeOptions], tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "loraplex.service").read_text()
    settings = dict(
        line.split("=", 1) for line in unit.splitlines() if "=" in line and not line.startswith("#")
    )
    program, *args = shlex.split(settings["ExecStart"])
    assert Path(program).name == "loraplex"
    args[args.index("--config") + 1] = str(DEPLOY / "systemd" / "loraplex.toml")
    options = options_of(args, started)
    assert options.shutdown_grace_s + ENDS_AFTER_S <= float(settings["TimeoutStopSec"])
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    checked = tmp_path / "loraplex.service"
    checked.write_text(unit.replace(program, sys.executable))  # it must exist
    done = subprocess.run(["systemd-analyze", "verify", str(checked)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
