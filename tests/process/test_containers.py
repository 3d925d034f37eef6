"""The files of `containers/` are what their formats allow, and their commands train."""

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from started import EXECUTE, Start

from instep.cli import GROUPS
from instep.cli.parsing import make_parser
from instep.lab import netlab
from instep.store.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "containers"
EXAMPLE = ROOT / "examples" / "01_digits"
NO = netlab.why_not()

RAY_JOB = {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"}
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD_GROUP = {"rayStartParams", "template"}
WORKER_GROUP = HEAD_GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas"}
"""Fields of KubeRay 1.7 (`ray.io/v1`, `ray.io_rayjobs.yaml`) that the manifest uses. It was held
against the whole schema when it was written."""


def tool(name: str) -> Any:
    """A module of the `dev` extra, which checks a format."""
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed; it is in the extra `dev`")


def compose() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())
    return made


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    claim, job = yaml.safe_load_all((CONTAINERS / "rayjob.yaml").read_text())
    return claim, job


def pods(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        metadata = {"name": "a-pod"}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **group["template"]}


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint is not installed; it is in the extra `dev`")
    done = subprocess.run([program, CONTAINERS / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_the_dockerfile_copies_exists_and_is_not_ignored() -> None:
    lines = (CONTAINERS / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    kept = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    assert copied
    assert all((ROOT / each).exists() for each in copied)
    assert {f"!{each}" for each in copied} <= set(kept)


def test_the_compose_file_is_one_by_its_specification() -> None:
    made = tool("compose_spec").PyCompose.from_json(json.dumps(compose()))
    assert made.service_names() == ["run", "host0", "host1", "host2"]
    for each in compose()["services"].values():
        make_parser(GROUPS).parse_args(each["command"])
        for volume in each["volumes"]:
            place = volume.split(":")[0]
            assert place in compose()["volumes"] or (CONTAINERS / place).exists(), place


def test_the_manifest_has_kuberays_fields_and_its_pods_are_pods() -> None:
    claim, job = manifests()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert set(job["spec"]) == RAY_JOB
    assert set(cluster) == RAY_CLUSTER
    assert set(cluster["headGroupSpec"]) == HEAD_GROUP
    assert set(workers) == WORKER_GROUP
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "instep"
    make_parser(GROUPS).parse_args(words)
    validator = tool("kubernetes_validate")
    version = validator.latest_version()
    validator.validate(claim, version, strict=True)
    for pod in pods(job):
        validator.validate(pod, version, strict=True)
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"][1:]]
        assert claims == [claim["metadata"]["name"]]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(NO is not None, reason=str(NO))
def test_the_commands_of_the_compose_file_train_on_three_hosts(
    start: Start, tmp_path: Path
) -> None:
    """Each in a network of its own, in the place of its container."""
    services, programs = compose()["services"], []
    (shared := tmp_path / "shared").mkdir()
    with netlab.Network(3) as network:
        places = dict(zip(services, [netlab.OUTSIDE, *network.hosts], strict=True))

        def here(text: str) -> str:
            for name, host in places.items():
                text = text.replace(f"{name}:", f"{network.address(host)}:")
            return text.replace("/shared", str(shared)).replace("/job/", f"{tmp_path}/")

        shutil.copy(EXAMPLE / "digits.py", tmp_path)
        (tmp_path / "job.toml").write_text(here((CONTAINERS / "job.toml").read_text()))
        for name, service in services.items():
            words = [sys.executable, "-m", "instep", *map(here, service["command"])]
            if places[name] == netlab.OUTSIDE:
                words += ["--set", "train.epochs=1"]
            else:
                words = ["ip", "netns", "exec", f"{network.name}-{places[name]}", *words]
            programs.append(start("-c", EXECUTE, *words))
        assert [program.end() for program in programs] == [0, 0, 0, 0], programs[0].stderr
        for program in programs:
            program.check_no_process_is_left()
    (run,) = (shared / "runs").iterdir()
    joined = RunFolder(run).named("worker_joined")
    assert {event["host"] for event in joined} == {0, 1, 2}
    assert RunFolder(run).last("run_finished")["outcome"] == "completed"
