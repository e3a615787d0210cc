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
from loraplex.server.options import ServeOptions

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
FOLDERS = ("kubernetes", "kuberay")
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


def documents(folder: str = "kubernetes") -> Iterator[dict[str, Any]]:
    for path in sorted((DEPLOY / folder).glob("*.yaml")):
        if path.stem != "kustomization":
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_kustomization_lists_all_manifests_of_its_folder(folder: str) -> None:
    listed = yaml.safe_load((DEPLOY / folder / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(p.name for p in (DEPLOY / folder).iterdir())


def ray_cluster() -> dict[str, Any]:
    [found] = [each for each in documents("kuberay") if each["kind"] == "RayCluster"]
    return found


def ray_pods() -> list[dict[str, Any]]:
    """The pods of Ray's head, and of each group of workers."""
    spec = ray_cluster()["spec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def front_command() -> list[str]:
    """The front's arguments, of the script that the container of Ray's head runs."""
    container = ray_pods()[0]["containers"][0]
    [script] = container["args"]
    assert subprocess.run([container["command"][0], "-n"], input=script, text=True).returncode == 0
    before, command = script.split("exec loraplex ")
    assert "$KUBERAY_GEN_RAY_START_CMD &" in before, "Ray's head runs beside the front"
    return shlex.split(command.replace("\\\n", " "))


def test_kuberay_starts_a_fleet_that_our_command_accepts(started: list[ServeOptions]) -> None:
    cluster, pod = ray_cluster()["spec"], ray_pods()[0]
    [container] = pod["containers"]
    options = options_of(front_command(), started)
    assert options.ray is not None
    assert options.host == "0.0.0.0"
    assert options.shutdown_grace_s + ENDS_AFTER_S <= pod["terminationGracePeriodSeconds"]
    assert container["livenessProbe"]["httpGet"]["path"] == LIVE_PATH
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in READY_PATHS
    assert options.port in [port["containerPort"] for port in container["ports"]]
    # As many GPUs as replicas, and none of them beside the front.
    workers = cluster["workerGroupSpecs"]
    gpus = [int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for pod in ray_pods()[1:]]
    assert sum(each["replicas"] * n for each, n in zip(workers, gpus, strict=True)) == options.num_replicas
    assert all(each["minReplicas"] <= each["replicas"] <= each["maxReplicas"] for each in workers)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    environment = {each["name"] for each in container["env"] if each["name"].startswith("LORAPLEX_")}
    shown = ["config", "show", "--json", *front_command()]
    done = CliRunner().invoke(app, shown, env=dict.fromkeys(environment, "secret"))
    origins = {row["from"] for row in json.loads(done.stdout)}
    assert {f"environment {name}" for name in environment} <= origins


def test_kuberay_pods_are_one_kind_of_node(started: list[ServeOptions]) -> None:
    cluster = ray_cluster()
    constraints = (ROOT / "constraints.txt").read_text().split()
    assert f"ray=={cluster['spec']['rayVersion']}" in constraints, "Ray's version is that of the images"
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    claimed = {each["metadata"]["name"] for each in documents("kuberay") if "Claim" in each["kind"]}
    options = options_of(front_command(), started)
    for pod in ray_pods():
        [container] = pod["containers"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
        assert not pod["enableServiceLinks"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert [str(each) for each in options.adapter_dirs] == [mounts["adapters"]], (
            "the same path everywhere"
        )
        used = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
        assert {each["claimName"] for each in used} <= claimed
    [worker] = cluster["spec"]["workerGroupSpecs"]
    [container] = worker["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        port = ports[container[probe]["tcpSocket"]["port"]]
        assert str(port) == worker["rayStartParams"]["node-manager-port"]


def test_the_service_of_kuberay_finds_the_front(started: list[ServeOptions]) -> None:
    [service] = [each for each in documents("kuberay") if each["kind"] == "Service"]
    labels = {
        "ray.io/cluster": ray_cluster()["metadata"]["name"],
        "ray.io/node-type": "head",
    }  # as KubeRay sets
    assert service["spec"]["selector"] == labels
    [port] = service["spec"]["ports"]
    named = {each["name"] for each in ray_pods()[0]["containers"][0]["ports"]}
    assert port["targetPort"] in named
    assert service["metadata"]["name"] in options_of(front_command(), started).allowed_hosts


@pytest.mark.slow
def test_ray_starts_with_these_options() -> None:
    ray = pytest.importorskip("ray.scripts.scripts")
    known = {option for parameter in ray.start.params for option in parameter.opts}
    groups = (ray_cluster()["spec"]["headGroupSpec"], *ray_cluster()["spec"]["workerGroupSpecs"])
    assert {f"--{name}" for group in groups for name in group["rayStartParams"]} <= known


@pytest.mark.slow
def test_kubernetes_schemas_accept_the_manifests() -> None:
    """`make test-all` installs the schemas. A RayCluster is not among them, but its pods are."""
    schemas = pytest.importorskip("kubernetes_validate")
    of_ray = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, "spec": pod} for pod in ray_pods()
    ]
    known = [each for folder in FOLDERS for each in documents(folder) if each["kind"] != "RayCluster"]
    for document in (*known, *of_ray):
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
