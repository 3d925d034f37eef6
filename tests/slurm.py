"""A real Slurm for tests: controller, authentication, and several nodes on this machine.

It needs root and Debian's packages slurm-wlm and munge; no systemd, no cgroups. Every process that
comes of it has the path of its configuration in its environment, by which it is found and ended.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from instep.lab.netlab import OUTSIDE, Network

_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "salloc", "scontrol", "squeue")
_SOON_S = 600.0

# a job that is queued again waits for cred_expire, which is 120 by default
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}({address})
SlurmctldPort={port}
SrunPortRange=61001-61999
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdTimeout=10
KillWait=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"there is no {missing[0]} (apt-get install slurm-wlm munge)" if missing else None


class Slurm:
    """A cluster with nodes n0, n1, ...

    Args:
        folder: empty, for this cluster alone.
        nodes: how many.
        network: has a host for each node, with an address of its own.
    """

    def __init__(self, folder: Path, nodes: int = 3, network: Network | None = None) -> None:
        self.nodes = [f"n{number}" for number in range(nodes)]
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._entering: dict[str, list[str]] = {}  # words that run a command on a node
        self.configuration = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.configuration)}
        ports = _free_ports(nodes + 1)
        host = socket.gethostname()
        self.ports = {*ports, *range(61001, 62000)}
        addresses, address = ["127.0.0.1"] * nodes, "127.0.0.1"
        if network is not None:
            addresses, address = [*map(network.address, network.hosts)], network.address(OUTSIDE)
            for name, place in zip(self.nodes, network.hosts, strict=True):
                # not `ip netns exec`: slurmd needs the cgroups that it hides
                self._entering[name] = ["nsenter", f"--net=/run/netns/{network.name}-{place}"]
        places = [
            f"NodeName={name} NodeHostname={host} NodeAddr={place} Port={port} CPUs=16"
            for name, place, port in zip(self.nodes, addresses, ports[1:], strict=True)
        ]
        text = _CONFIGURATION.format(
            host=host, address=address, port=ports[0], folder=folder, nodes="\n".join(places)
        )
        self.configuration.write_text(text)
        for name in ("state", *self.nodes):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._of_node: dict[str, subprocess.Popen[bytes]] = {}
        try:
            places = [("key-file", key.name), ("socket", "munge.socket"), ("pid-file", "munge.pid")]
            places += [("log-file", "munge.log"), ("seed-file", "munge.seed")]
            words = [f"--{option}={folder / name}" for option, name in places]
            self._start("munged", "--foreground", "--force", *words)
            until(lambda: (folder / "munge.socket").exists(), "munged to listen")
            self._start("slurmctld", "-D")
            for name in self.nodes:
                self.up(name)
            until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "idle nodes")
        except BaseException:
            self.close()
            raise

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self._folder / "daemons.log", "ab") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints; empty if it fails."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=_SOON_S, check=False
        )
        return done.stdout if done.returncode == 0 else ""

    @contextlib.contextmanager
    def allocation(self, nodes: int, *words: str) -> Iterator[dict[str, str]]:
        """Nodes for as long as the context lasts; the environment of a process in it."""
        environment = {**os.environ, **self.environment}
        command = ["salloc", f"--nodes={nodes}", "--no-kill", "--no-shell", "--cpus-per-task=2"]
        command += words
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        job = done.stderr.split("Granted job allocation ")[1].split()[0]
        try:
            yield {**self.environment, "SLURM_JOB_ID": job}
        finally:
            self.cancel(job)

    def cancel(self, *jobs: str) -> None:
        """End jobs, and wait until they are gone."""
        self.ask("scancel", "--quiet", *jobs)
        until(lambda: not self.ask("squeue", "-h", "-j", ",".join(jobs)), "the end of jobs")

    def cancel_all(self) -> None:
        """The same of all jobs."""
        if jobs := self.ask("squeue", "-h", "-o", "%A").split():
            self.cancel(*jobs)

    def up(self, node: str, *mount: Path) -> None:
        """Start a node, for the first time or again; `mount`: a folder, and where it has it."""
        command = ["slurmd", "-D", "-N", node]
        if mount:
            words = shlex.join(["mount", "--bind", *map(str, mount)])
            command = ["unshare", "--mount", "sh", "-c", f"{words} && exec {shlex.join(command)}"]
        self._of_node[node] = self._start(*self._entering.get(node, []), *command)

    @contextlib.contextmanager
    def mounted(self, node: str, folder: Path, place: Path) -> Iterator[None]:
        """Have a node find another folder at a place, for as long as the context lasts."""
        self.down(node)
        self.up(node, folder, place)
        try:
            until(lambda: self.is_idle(node), f"{node} to be there")
            yield
        finally:
            self.down(node)
            self.up(node)
            until(lambda: self.is_idle(node), f"{node} to be there again")

    def is_idle(self, node: str) -> bool:
        """Whether jobs can have it."""
        return self.ask("sinfo", "-h", "-n", node, "-o", "%T").strip() == "idle"

    def crash(self, node: str) -> float:
        """Kill everything on a node at once, as if its power failed; Slurm does not know yet.

        Returns:
            When that was, Unix seconds.
        """
        moment = self._kill(node)
        self._kill(node)  # what has started meanwhile
        return moment

    def _kill(self, node: str) -> float:
        there = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node or node in process.cmdline():
                    there.append(process)
        moment = time.time()
        self._of_node[node].kill()
        for process in there:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return moment

    def down(self, node: str) -> float:
        """The same, and have Slurm know: the node leaves its allocations."""
        moment = self.crash(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        return moment

    def processes(self) -> list[psutil.Process]:
        """All that came of it, and those that were given its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.configuration):
                    found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def close(self) -> None:
        """End jobs and daemons; what is left by then is killed."""
        with contextlib.suppress(Exception):
            self.cancel_all()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {_SOON_S:g} s for {what}"
        time.sleep(0.05)
