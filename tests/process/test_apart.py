"""`instep.join` on emulated hosts that share no folder: what each host sees at the same path is a
folder of its own."""

import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
from safetensors.torch import load_file
from started import EXECUTE, RECIPES, TIMEOUT_S, Start, Started
from test_encrypted_hosts import Capture, is_tls
from test_partitions import needs_hosts

from disks import Disk
from instep.control.journal import FILE
from instep.data.order import Order, position
from instep.lab import netlab
from instep.recipe.build import seed_everything
from instep.store.run_folder import RunFolder

pytestmark = [pytest.mark.process, needs_hosts]

SCRIPT = RECIPES / "joins_apart.py"
SAMPLES, BATCH, EPOCHS, STEPS = 101, 16, 4, 28
_OWN_DISK = (
    'mount --bind "$1" "$2" && mount --bind "$3" /etc/hosts && cd "$2" && shift 3 && exec "$@"'
)


class Apart:
    """Hosts with a disk each, all of which is at the same path.

    Args:
        start: starts a program.
        network: with the hosts.
        folder: empty.
        shared: whether they have one disk instead.
    """

    def __init__(
        self, start: Start, network: netlab.Network, folder: Path, *, shared: bool = False
    ) -> None:
        self._start, self._network, self._starts = start, network, count(1)
        self._here = folder / "here"
        self._here.mkdir(parents=True)
        self._names = folder / "hosts"  # the name of this machine is that of the first host
        self._names.write_text(f"{network.address('h1')} {platform.node()}\n")
        names = ["one" if shared else host for host in network.hosts]
        self.disks = [folder / f"disk-{name}" for name in names]
        for disk in self.disks:
            disk.mkdir(exist_ok=True)
            token = disk / "token"
            token.write_text("5a" * 16 + "\n")
            token.chmod(0o600)

    def start(
        self, processes: Sequence[int], *arguments: object, at_a_file: bool = False
    ) -> list[Started]:
        """One start of the script, with so many processes on each host."""
        job, size, programs = str(next(self._starts)), sum(processes), []
        for host, local in [(h, n) for h, many in enumerate(processes) for n in range(many)]:
            environment = {
                "RANK": str(len(programs)),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(processes[host]),
                "TORCHELASTIC_RUN_ID": job,
            }
            programs.append(self._on(host, [SCRIPT, *arguments], environment, at_a_file))
        return programs

    def torchrun(self, processes: int, *arguments: object) -> list[Started]:
        """One start by torchrun, with so many processes on each of two hosts."""
        each = ["--nnodes", 2, "--nproc-per-node", processes, "--master-port", 29500]
        each += ["--master-addr", self._network.address("h1")]
        ran = ["-m", "torch.distributed.run", *each, "--node-rank"]
        return [self._on(host, [*ran, host, SCRIPT, *arguments], {}) for host in (0, 1)]

    def mpirun(self, processes: int, *arguments: object) -> Started:
        """One start by Open MPI on the first host, with so many processes on each of two."""
        agent = self._here.with_name("agent")  # in the place of ssh: an address, and a command
        enter = shlex.join(self._entering(1))
        agent.write_text(f'#!/bin/sh\nshift\nexec {enter} sh -c "hostname two; $*"\n')
        agent.chmod(0o700)
        hosts = ",".join(f"{self._network.address(h)}:{processes}" for h in ("h1", "h2"))
        settings = {"plm_rsh_agent": agent, "oob_tcp_if_include": "eth0"}
        ran = ["mpirun", "--allow-run-as-root", "--host", hosts, "-n", 2 * processes]
        ran += [word for pair in settings.items() for word in ("--mca", *pair)]
        ran += [word for name in self._said for word in ("-x", name)]
        return self._start(
            "-c",
            EXECUTE,
            *self._entering(0),
            *ran,
            sys.executable,
            SCRIPT,
            *arguments,
            environment=self._said,
        )

    @property
    def _said(self) -> dict[str, str]:
        return {
            "INSTEP_RENDEZVOUS": f"{self._network.address('h1')}:29600",
            "INSTEP_TOKEN_FILE": str(self._here / "token"),
        }

    def _entering(self, host: int) -> list[str]:
        """What runs the command that follows on a host."""
        space = f"{self._network.name}-{self._network.hosts[host]}"
        enter = ["ip", "netns", "exec", space, "unshare", "-m", "-u", "sh", "-c", _OWN_DISK, "sh"]
        return [*enter, *map(str, (self.disks[host], self._here, self._names))]

    def _on(
        self,
        host: int,
        command: list[object],
        environment: dict[str, str],
        at_a_file: bool = False,
    ) -> Started:
        program = [*self._entering(host), sys.executable, *command]
        where = {} if at_a_file else self._said
        return self._start("-c", EXECUTE, *program, environment={**where, **environment})

    def train(
        self, processes: Sequence[int], *arguments: object, at_a_file: bool = False
    ) -> list[Started]:
        """The same to its end, with nothing left of it."""
        programs = self.start(processes, *arguments, at_a_file=at_a_file)
        for program in programs:
            assert program.end() == 0, "".join(each.stderr for each in programs)
        self.check_nothing_is_left(programs)
        return programs

    def check_nothing_is_left(self, programs: Sequence[Started]) -> None:
        """Neither processes nor files, but in the run's folder on the first host."""
        for program in programs:
            program.check_no_process_is_left()
            program.check_no_file_is_left()
            assert list(program.work.iterdir()) == []
        assert {path.name for path in self.disks[0].iterdir()} == {"token", "runs"}
        for disk in {*self.disks} - {self.disks[0]}:
            assert [path.name for path in disk.iterdir()] == ["token"]

    def run(self, name: str) -> RunFolder:
        """A run, on the disk of the first host."""
        return RunFolder(self.disks[0] / "runs" / name)


@pytest.fixture
def network() -> Iterator[netlab.Network]:
    with netlab.Network(3) as made:
        yield made


@pytest.fixture
def apart(start: Start, network: netlab.Network, tmp_path: Path) -> Apart:
    return Apart(start, network, tmp_path / "apart")


@pytest.fixture
def together(start: Start, network: netlab.Network, tmp_path: Path) -> Apart:
    """The same hosts with a disk that they share."""
    return Apart(start, network, tmp_path / "together", shared=True)


def alone(start: Start, *arguments: object) -> RunFolder:
    """The run of one process without any company."""
    program = start(SCRIPT, *arguments)
    assert program.end() == 0, program.stderr
    return RunFolder(program.run)


def facts(run: RunFolder) -> dict[str, Any]:
    """What must be alike in runs that had nothing to do with each other."""
    assert run.outcome == "completed"
    assert run.audit.exact
    summary = json.loads((run.path / "summary.json").read_text())
    return {
        "steps": summary["steps"],
        "hash": run.last("model_saved")["parameters_sha256"],
        "ledger": run.audit.sha256,
        "validations": {e["step"]: e["metrics"] for e in run.validations if e["scheduled"]},
        "repeated": summary["repeated_samples"],
        "missing": summary["missing_samples"],
    }


def plain() -> dict[str, torch.Tensor]:
    """What plain PyTorch makes of the recipe."""
    seed_everything(5)
    made, order = tiny.recipe(), Order(SAMPLES, 5)
    model = made.model
    optimizer = made.optimizer(list(model.parameters()))
    for step in range(1, STEPS + 1):
        where = position(step, SAMPLES, BATCH)
        rows = torch.from_numpy(order.indices(*where))
        inputs, target = made.train[rows]
        optimizer.zero_grad()
        made.loss(model(inputs), target).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.slow
def test_hosts_that_share_no_folder_come_to_what_one_process_does_and_send_no_plain_byte(
    start: Start, network: netlab.Network, apart: Apart, tmp_path: Path
):
    capture = Capture(network, tmp_path)
    apart.train([2, 1], "recipe", 0)
    check_encrypted(apart.run("recipe"), capture)
    run, one = apart.run("recipe"), alone(start, "recipe", 0)
    assert facts(run) == facts(one)
    assert facts(run)["steps"] == STEPS
    saved, wanted = load_file(run.path / "model.safetensors"), plain()
    for name, tensor in wanted.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)


def check_encrypted(run: RunFolder, capture: Capture) -> None:
    streams = [stream for stream in capture.streams() if stream]
    assert run.last("run_started")["encrypted"] is True
    assert "Traffic between hosts was encrypted" in (run.path / "report.html").read_text()
    assert len(streams) >= 2 * 2  # each way, with the master and between workers
    assert all(map(is_tls, streams))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["recipe", "own"])
def test_hosts_that_share_a_folder_meet_there_and_send_no_plain_byte(
    network: netlab.Network, together: Apart, tmp_path: Path, case: str
):
    capture = Capture(network, tmp_path)
    together.train([1, 1], case, 12, at_a_file=True)
    check_encrypted(together.run(case), capture)


@pytest.mark.slow
def test_on_a_private_network_nothing_is_encrypted_but_the_meeting(
    start: Start, network: netlab.Network, apart: Apart, tmp_path: Path
):
    capture = Capture(network, tmp_path)
    apart.train([1, 1], "private", 0)
    streams = [stream for stream in capture.streams() if stream]
    run = apart.run("private")
    assert facts(run) == facts(alone(start, "private", 0))
    assert run.last("run_started")["encrypted"] is False
    assert "was not encrypted" in (run.path / "report.html").read_text()
    assert any(b"Heartbeat" in stream for stream in streams)
    assert not any(b"5a" * 16 in stream for stream in streams)  # the token


@pytest.mark.slow
def test_torchrun_on_two_hosts_needs_no_shared_folder(start: Start, apart: Apart):
    programs = apart.torchrun(2, "recipe", 0)
    for program in programs:
        assert program.end() == 0, "".join(each.stderr for each in programs)
        program.check_no_process_is_left()
    assert [path.name for path in apart.disks[1].iterdir()] == ["token"]
    assert facts(apart.run("recipe")) == facts(alone(start, "recipe", 0))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun (Open MPI)")
def test_mpirun_on_two_hosts_needs_no_shared_folder(start: Start, apart: Apart):
    program = apart.mpirun(2, "recipe", 0)
    assert program.end() == 0, program.stderr
    program.check_no_process_is_left()
    assert [path.name for path in apart.disks[1].iterdir()] == ["token"]
    assert facts(apart.run("recipe")) == facts(alone(start, "recipe", 0))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["recipe", "own"])
def test_a_run_goes_on_on_other_hosts_than_before(start: Start, apart: Apart, case: str):
    apart.train([1, 1], case, 9)
    apart.train([1, 1, 1], case, 18)
    apart.train([2, 1], case, 0)
    run = apart.run(case)
    assert facts(run) == facts(alone(start, case, 0))
    if case == "recipe":  # complete: nothing is left to do, and each process knows how far it came
        saved = (run.path / "model.safetensors").read_bytes()
        for program in apart.train([1, 1], case, 0):
            assert program.stdout.split() == ["[]", str(STEPS)]
        assert (run.path / "model.safetensors").read_bytes() == saved


@pytest.mark.slow
def test_what_a_codec_left_out_is_in_the_checkpoint(apart: Apart, together: Apart):
    for hosts in (apart, together):
        for stop in (9, 0):
            hosts.train([1, 1], "codec", stop)
    assert facts(apart.run("codec")) == facts(together.run("codec"))


@pytest.mark.slow
def test_ranks_of_a_mesh_send_their_parts_and_read_what_they_need(apart: Apart, together: Apart):
    for hosts in (apart, together):
        hosts.train([1, 1], "split", 9)
        hosts.train([1, 2, 1], "split", 18)  # a second replica, of which no rank sees the folder
        hosts.train([1, 1], "split", 0)
    assert facts(apart.run("split")) == facts(together.run("split"))


@pytest.mark.slow
def test_a_replica_that_does_not_see_the_folder_is_cut_as_the_first_one(
    apart: Apart, together: Apart
):
    for hosts in (apart, together):
        hosts.train([2, 2], "cut", 6)
        hosts.train([1, 1], "cut", 0)
    assert facts(apart.run("cut")) == facts(together.run("cut"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_lost_a_process_is_resumed(start: Start, apart: Apart, rank: int):
    programs = apart.start([1, 1], "recipe", 0, 0.01)
    saved = apart.disks[0] / "runs" / "recipe" / "checkpoints"
    programs[0].until(lambda: len(list(saved.glob("step-*"))) > 1, "saved twice")
    programs[rank].process.kill()
    other = programs[1 - rank]
    assert other.end() != 0
    programs[rank].end()
    if rank == 1:
        assert "worker 1 failed" in other.stderr
    apart.check_nothing_is_left(programs)
    apart.train([1, 1], "recipe", 0, 0.01)
    assert facts(apart.run("recipe")) == facts(alone(start, "recipe", 0))


@pytest.mark.slow
def test_a_process_with_another_token_is_refused_and_the_run_ends(apart: Apart):
    (apart.disks[1] / "token").write_text("a5" * 16 + "\n")
    zero, one = apart.start([1, 1], "recipe", 0)
    assert one.end() == 1
    assert "does not have the token in" in one.stderr
    zero.kill()


@pytest.fixture
def small_disks(
    start: Start, network: netlab.Network, tmp_path: Path
) -> Iterator[tuple[Apart, list[Disk]]]:
    """Hosts whose disks have 8 MB each."""
    (folder := tmp_path / "small").mkdir()
    disks = [Disk(folder / f"disk-{host}", 8_000_000) for host in network.hosts]
    yield Apart(start, network, folder), disks
    for disk in disks:
        disk.close()


def until_saved_twice(apart: Apart, programs: Sequence[Started]) -> None:
    saved = apart.disks[0] / "runs" / "recipe" / "checkpoints"
    programs[0].until(lambda: len(list(saved.glob("step-*"))) > 1, "saved twice")


def check_all_end_with(programs: Sequence[Started], *parts: str) -> None:
    """Each with the same cause, and nothing is left of them."""
    for program in programs:
        assert program.end() not in (0, None)
        last = program.stderr[program.stderr.rindex("instep.errors.") :]
        for part in parts:
            assert part in last, last
        program.check_no_process_is_left()
        program.check_no_file_is_left()


@pytest.mark.slow
def test_a_full_disk_of_a_host_without_the_folder_does_not_matter(
    start: Start, small_disks: tuple[Apart, list[Disk]]
):
    apart, disks = small_disks
    disks[1].fill()
    programs = apart.start([1, 1], "recipe", 0)
    for program in programs:
        assert program.end() == 0, program.stderr
        program.check_no_process_is_left()
    assert facts(apart.run("recipe")) == facts(alone(start, "recipe", 0))


@pytest.mark.slow
def test_a_full_disk_of_the_host_with_the_folder_ends_all_and_with_room_the_run_goes_on(
    start: Start, small_disks: tuple[Apart, list[Disk]]
):
    apart, disks = small_disks
    programs = apart.start([1, 1], "recipe", 0, 0.01)
    until_saved_twice(apart, programs)
    deadline = time.monotonic() + TIMEOUT_S
    while any(program.process.poll() is None for program in programs):
        disks[0].fill()  # what is deleted meanwhile makes no room
        assert time.monotonic() < deadline, "it trains on without a ledger"
        time.sleep(0.02)
    # the ledger, the journal or the last checkpoint, whichever was to be written first
    check_all_end_with(programs, "Make room, or get access", "/runs/recipe")
    assert apart.run("recipe").audit.exact
    disks[0].make_room()
    apart.train([1, 1], "recipe", 0, 0.01)
    assert facts(apart.run("recipe")) == facts(alone(start, "recipe", 0))


@pytest.mark.slow
def test_a_damaged_journal_ends_all_hosts_once_another_master_needs_it_and_the_run_goes_on(
    start: Start, apart: Apart
):
    programs = apart.start([1, 1], "recipe", 0, 0.01)
    until_saved_twice(apart, programs)
    master = psutil.Process(apart.run("recipe").last("master_started")["pid"])
    master.suspend()  # it would write what it knows over the damage
    with (apart.disks[0] / "runs" / "recipe" / FILE).open("r+b") as journal:
        size = journal.seek(0, os.SEEK_END)
        journal.seek(size // 2)
        journal.write(b"\xff" * (size // 2))
    master.kill()
    check_all_end_with(programs, f"/runs/recipe/{FILE} is damaged (")
    apart.train([1, 1], "recipe", 0, 0.01)
    found, wanted = facts(apart.run("recipe")), facts(alone(start, "recipe", 0))
    for each in (found, wanted):
        del each["validations"]  # of those after the damage nobody could be told
    assert found == wanted
