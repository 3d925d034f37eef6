"""Callers that connect to a run's master and say nothing: many more than it can have files open."""

import json
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started

import instep

pytestmark = [pytest.mark.process, pytest.mark.cold]

STRANGERS, FILES = 2000, 1024
TRAIN = {"epochs": 150, "global_batch": 16, "threads": 1, "determinism": "bits"}

LIMITED = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({FILES}, {FILES}))
sys.argv = ["instep", *sys.argv[1:]]
runpy.run_module("instep", run_name="__main__")
"""


@pytest.fixture
def room() -> Iterator[ExitStack]:
    """For as many sockets on our side, which end with the test."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, max(before, 3 * STRANGERS)), most))
    with ExitStack() as stack:
        yield stack
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def masters(program: Started) -> list[tuple[str, int]]:
    """Where the run's master listens, once it does."""
    found = []
    for process in program.processes():
        with suppress(psutil.Error):
            if "instep.control.master_process" in process.cmdline():
                found += [
                    (each.laddr.ip, each.laddr.port)
                    for each in process.net_connections("inet")
                    if each.status == psutil.CONN_LISTEN
                ]
    return found


def call(address: tuple[str, int], times: int, room: ExitStack) -> None:
    for _ in range(times):
        room.enter_context(socket.create_connection(address, timeout=600))


@pytest.mark.slow
def test_two_thousand_strangers_change_nothing_where_a_thousand_files_may_be_open(
    start: Start, tmp_path: Path, room: ExitStack
) -> None:
    undisturbed = instep.train(
        f"{RECIPES / 'tiny.py'}:recipe",
        name="undisturbed",
        runs=tmp_path,
        workers=1,
        seed=5,
        quiet=True,
        train=TRAIN,
    )
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "attacked"\nrecipe = "{RECIPES}/tiny.py:recipe"\nworkers = 2\nseed = 5\n[train]\n'
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in TRAIN.items())
    )
    program = start("-c", LIMITED, "run", job)
    program.until(lambda: bool(masters(program)), "listening")
    (address,) = masters(program)
    call(address, STRANGERS, room)  # nobody of the run has called yet
    program.until(program.is_training, "training")
    call(address, STRANGERS, room)
    assert program.events("run_finished") == []
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == undisturbed.summary["parameters_sha256"]
    assert len(program.events("master_started")) == 1
    assert program.events("worker_lost") == []
    program.check_nothing_is_left()
