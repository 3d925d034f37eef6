"""Runs on Ray: a real cluster, of several nodes where one is lost."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_ray import (
    KEYS,
    ON_RAY,
    STORE_BYTES,
    actor_of,
    cluster,
    end_of,
    fork_server_of,
    hash_alone,
    of_hosts,
    raylet_of,
    wait_until_spread,
    worker_on,
)
from started import RECIPES, TIMEOUT_S, Start, kill, newest_pids

import instep
from instep.client.job_checks import check_job
from instep.client.launching import launching
from instep.comm.protocol.channel import Address, listen
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import INTERRUPTED, SpecError
from instep.job.file import build
from instep.job.spec import JobSpec
from instep.launch.ray.cluster import connect
from instep.store.run_folder import RunFolder
from instep.system.addresses import address_towards

pytestmark = pytest.mark.process

__all__ = ["cluster"]  # the fixture

TINY = f"{RECIPES / 'tiny.py'}:recipe"
TRAIN = {"steps": 30, "determinism": "bits"}


def job(**launch: Any) -> JobSpec:
    table = {"recipe": TINY, "workers": 2, "launch": {"on": "ray", **launch}}
    return build(table, source="a test")


def refusal(made: JobSpec) -> str:
    with pytest.raises(SpecError) as caught, launching(made):
        pass
    return str(caught.value)


@pytest.fixture(scope="module")
def own_program() -> Iterator[None]:
    """A program that has a Ray cluster of its own."""
    pytest.importorskip("ray")
    ray, _ = connect("local", 2)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_run_within_somebodys_own_ray_program_has_the_result_of_one_machine(
    tmp_path: Path, own_program: None
) -> None:
    import ray

    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    priority = ray.remote(lambda: os.getpriority(os.PRIO_PROCESS, 0))
    assert ray.get(priority.remote()) == os.getpriority(os.PRIO_PROCESS, 0)  # Ray's own is low
    alone = instep.train(TINY, runs=tmp_path, quiet=True, train=TRAIN)
    half = instep.train(
        TINY,
        runs=tmp_path,
        quiet=True,
        on="ray",
        train={**TRAIN, "stop_after_steps": 12},
        launch={"nodes": 2, "address": address_towards("192.0.2.1")},  # not loopback: encrypted
    )
    assert half.summary["steps"] == 12
    assert RunFolder(half.path).last("run_started")["encrypted"] is True
    done = instep.resume(half.path, quiet=True, launch={"nodes": 1})
    assert done.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    assert done.summary["repeated_samples"] == done.summary["missing_samples"] == 0
    assert of_hosts() == set()
    assert ray.is_initialized()  # it is the program's, not ours


@pytest.mark.slow
def test_a_task_and_an_actor_of_somebodys_own_ray_program_train_and_stay_connected(
    tmp_path: Path, own_program: None
) -> None:
    import ray

    def trained(runs: Path) -> tuple[str, bool]:
        done = instep.train(
            TINY, runs=runs, quiet=True, workers=1, on="ray", train=TRAIN, launch={"nodes": 1}
        )
        return done.summary["parameters_sha256"], ray.is_initialized()

    class Trainer:
        def trained(self, runs: Path) -> tuple[str, bool]:
            return trained(runs)

    alone = instep.train(TINY, runs=tmp_path, quiet=True, train=TRAIN)
    in_task = ray.remote(num_cpus=0.5)(trained).remote(tmp_path / "task")
    actor = ray.remote(num_cpus=0.5)(Trainer).remote()
    expected = (alone.summary["parameters_sha256"], True)
    assert ray.get(in_task) == ray.get(actor.trained.remote(tmp_path / "actor")) == expected
    assert of_hosts() == set()


def test_a_folder_for_nodes_is_refused_where_ray_is_connected_or_there_is_none(
    own_program: None,
) -> None:
    text = refusal(job(options={"working_dir": "."}))
    assert text.endswith("Give it there: ray.init(runtime_env={'working_dir': ...}).")


def test_what_a_cluster_lacks_is_said_before_anything_starts(
    tmp_path: Path, own_program: None
) -> None:
    much = refusal(job(nodes=3, options={"wait_s": 0.5}))
    assert "has had no room for 3 hosts with 1 CPU each for 0.5 s. It has 1 node (2 CPUs)" in much
    assert "Ask for less with launch.nodes" in much
    gpus = refusal(job(nodes=1, gpus=1, options={"wait_s": 0.5, "resources": {"fast": 2}}))
    assert "no room for 1 host with 2 CPUs, 1 GPU, 2 fast each" in gpus
    assert of_hosts() == set()


def test_a_node_without_the_recipe_or_with_another_torch_is_named(
    monkeypatch: pytest.MonkeyPatch, own_program: None
) -> None:
    monkeypatch.setattr("instep.launch.node._sha256", lambda file: "another")
    patient = job(nodes=1, options={"wait_s": TIMEOUT_S})
    assert f"has another recipe in {RECIPES / 'tiny.py'}. Put recipe" in refusal(patient)
    monkeypatch.undo()
    monkeypatch.setattr("instep.launch.node.versions", lambda: (("instep", "9"), ("torch", "1")))
    text = refusal(patient)
    assert text.startswith("the node ")
    assert "has instep 0." in text
    assert text.endswith("and this machine 9. Install the same there.")


def test_a_wrong_option_is_refused_with_the_nearest_one() -> None:
    text = refusal(job(options={"ray_adress": "10.0.0.1:6379"}))
    assert text.startswith("launch.options: ray has no option 'ray_adress'. Did you mean 'ray_add")
    assert "launch.options of ray: Expected `float`" in refusal(job(options={"wait_s": "soon"}))


@pytest.mark.tail
def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    check_job(job())
    assert refusal(job()).endswith("not installed: pip install 'instep[ray]'.")


@pytest.mark.tail
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_cluster_that_is_not_there_is_refused_at_once() -> None:
    code = (
        "import sys\n"
        "from instep.launch.ray import cluster as ray_cluster\n"
        "ray_cluster.CONNECT_S = 0.5\n"
        "for address in sys.argv[1:]:\n"
        "    try:\n        ray_cluster.connect(address, 1)\n"
        "    except Exception as error:\n        print(type(error).__name__, error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]  # of something else than Ray
        command = [sys.executable, "-c", code, "127.0.0.1:9", "head", f"127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    refused, wrong, another = done.stdout.splitlines()
    assert refused.startswith("SpecError no Ray cluster at '127.0.0.1:9': ")
    assert "refused" in refused
    assert wrong.startswith("SpecError no Ray cluster at 'head': there is no port. ")
    assert "Give host:port of its head node" in wrong
    assert another.startswith(f"SpecError no Ray cluster at '127.0.0.1:{port}': timed out. ")


@pytest.mark.slow
def test_an_actor_a_fork_server_and_a_raylet_are_killed_and_the_result_is_that_of_one_machine(
    run: Start, cluster: Any
) -> None:
    expected = hash_alone(run)
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY)
    wait_until_spread(program)
    assert raylet_of(program, 0) != raylet_of(program, 1)
    kill(fork_server_of(program, worker_on(program, 0)).pid)  # its spare continues
    assert kill(actor_of(program, worker_on(program, 1)).pid)
    program.until(lambda: worker_on(program, 1) is None, "running without the actor")
    wait_until_spread(program)
    raylet = raylet_of(program, 1)
    actor_of(program, worker_on(program, 1)).suspend()  # it is the kernel that ends its processes
    assert kill(raylet)
    program.until(lambda: worker_on(program, 1) is None, "running without the node")
    assert not program.events("went_back")  # the new actor was not beside the other
    wait_until_spread(program)
    assert program.end() == 0, program.stderr
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert program.summary["parameters_sha256"] == expected
    assert of_hosts() == set()
    program.check_no_process_is_left()


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where Ray can make sockets, whose names are at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["the program's own", "an existing"])
def test_nothing_is_left_on_a_cluster_when_the_program_is_killed(
    run: Start, request: pytest.FixtureRequest, short_folder: None, whose: str
) -> None:
    if whose == "an existing":
        request.getfixturevalue("cluster")
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY, "train.steps=500")
    program.until(program.is_training, "training")
    processes = of_hosts() | {
        child
        for worker in newest_pids(program)
        for child in fork_server_of(program, worker).children(recursive=True)
    }
    assert len(processes) >= 4
    if whose == "the program's own":
        assert program.listened <= {"127.0.0.1", "::ffff:127.0.0.1"}
    program.process.kill()
    end_of(processes)
    program.check_no_process_is_left()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_stops_at_a_commit_and_ends_the_programs_own_cluster(
    run: Start, short_folder: None
) -> None:
    program = run("slow_tiny.py:recipe", *KEYS, 'launch.on="ray"')
    program.until(program.is_training, "training")
    os.killpg(program.process.pid, signal.SIGINT)  # as a terminal does
    assert program.end() == INTERRUPTED, program.stderr
    assert 0 < program.summary["steps"] < 400
    assert program.summary["outcome"] == "interrupted"
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_run_begins_on_the_nodes_that_are_there_and_a_worker_moves_to_one_that_comes(
    run: Start, cluster: Any
) -> None:
    expected = hash_alone(run)
    late = ("launch.nodes=3", "launch.cpus=2", "launch.options.at_least=2")
    program = run("slow_tiny.py:recipe", *KEYS, *ON_RAY, "workers=3", *late)
    program.until(program.is_training, "training")
    assert {event["host"] for event in program.events("worker_joined")} == {0, 1}
    cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)

    def is_on_the_third() -> bool:
        return any(event["host"] == 2 for event in program.events("worker_joined"))

    # of the two hosts one has two workers, so that one moves
    program.until(lambda: len(program.events("host_joined")) >= 3, "the third host")
    program.until(is_on_the_third, "a worker on it")
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == expected


@pytest.mark.slow
def test_a_host_is_looked_at_by_one_process_at_a_time_however_often_it_is_asked_for(
    tmp_path: Path, own_program: None
) -> None:
    with launching(job(nodes=1)) as (_, launcher), listen() as master:
        launcher.start(Endpoint(Address(*master.getsockname()), "secret", 0), tmp_path)
        before = python_workers()
        for _ in range(50):
            launcher.end_if_stopped()
        deadline = time.monotonic() + 5  # others would start meanwhile
        while time.monotonic() < deadline:
            assert len(python_workers() - before) <= 1
            time.sleep(0.1)


def python_workers() -> set[int]:
    """Processes of this program's cluster that run tasks, or wait for one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "default_worker.py" in words or words.startswith("ray::"):
                found.add(process.pid)
    return found
