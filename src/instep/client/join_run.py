"""A Slurm job adds its nodes to a run of another one, for as long as it has them.

The run is found by its folder. Its master says what the hosts are called; they are started and
looked after from here. Way in: `join_run`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from instep.client.host_watch import HostWatch
from instep.client.join import meeting
from instep.client.running import ANSWER_S, FILE, call, not_running, silent
from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import (
    AddHosts,
    Heartbeat,
    Hello,
    HostsAdded,
    HostsJoined,
    HostWanted,
    Leave,
    Over,
    Refused,
    RemoveHosts,
)
from instep.errors import PeerError, RunError, SpecError
from instep.launch.node import Needs
from instep.launch.slurm import SlurmLauncher
from instep.launch.slurm_cluster import allocation, check_nodes, is_over, nodes_of
from instep.store.run_folder import RunFolder
from instep.system.environment import SCHEDULERS
from instep.system.processes import on_signals
from instep.words import plural

LOOK_S = 0.1
"""Seconds between two looks at the hosts."""


def join_run(run: Path, workers: int | None, say: Callable[[str], None]) -> list[int]:
    """Add the nodes of this Slurm job to a running run, until one of both is over.

    Args:
        run: its folder.
        workers: how many more it is to have meanwhile; by default one for each task of the job.
        say: told what happens.

    Returns:
        The numbers of the hosts.

    Raises:
        RunError: there is no such run, it is not running, or it was lost.
        SpecError: it is not on Slurm, this is no Slurm job, or a node lacks something.
    """
    job = RunFolder(run).spec
    if workers is not None and workers < 0:
        raise SpecError(f"--workers {workers}: needs 0 or more, as the run has them in addition.")
    call(run).close()
    if job.launch.launcher != "slurm":
        raise SpecError(
            f"{run} is not on Slurm (launch.on = {job.launch.launcher!r}), so other machines "
            "cannot join it. Start it with --on slurm."
        )
    number = allocation()
    if not number:
        raise SpecError(
            "instep join-run outside a Slurm allocation, so there are no nodes to add. Get some: "
            f"sbatch --nodes=2 --wrap 'exec instep join-run {run.absolute()}', or salloc."
        )
    folder, nodes = run.resolve(), nodes_of(number)
    check_nodes(number, nodes, Needs.of(job), folder)
    if workers is None:
        workers = int(os.environ.get("SLURM_NTASKS", len(nodes)))
    endpoint, added = _add(run, len(nodes), workers)
    if os.path.isdir(added.folder):
        os.chdir(added.folder)  # where the hosts will be too
    launcher = SlurmLauncher(number, nodes, first=added.numbers[0])
    names = dict(zip(added.numbers, nodes, strict=True))
    try:
        _Joined(folder, number, launcher, endpoint, added, names, say).serve()
    except PeerError as error:
        if not RunFolder(folder).ending:
            raise RunError(f"{folder} was lost: {error}") from None
        say("the run is over")
    finally:
        launcher.stop()
    return added.numbers


def _add(run: Path, hosts: int, workers: int) -> tuple[Endpoint, HostsAdded]:
    """Have the master take hosts; where it is, and what it calls them."""
    endpoint = meeting.read(meeting.MeetingFile(run / FILE))
    channel = call(run)
    try:
        channel.send(AddHosts(count=hosts, workers=workers))
        added = channel.wait_for(HostsAdded, ANSWER_S)
    except PeerError:
        endpoint = None
    except TimeoutError:
        raise silent(run) from None
    finally:
        channel.close()
    if endpoint is None:
        raise not_running(run)
    if added.refusal:
        raise SpecError(f"{run} cannot have these nodes. {added.refusal}")
    return endpoint, added


class _Joined:
    """The hosts of this job, from their start to the end of the run or of the job."""

    def __init__(
        self,
        run: Path,
        allocation: str,
        launcher: SlurmLauncher,
        endpoint: Endpoint,
        added: HostsAdded,
        names: Mapping[int, str],
        say: Callable[[str], None],
    ) -> None:
        self._names, self._address = names, endpoint.address
        self._run, self._allocation, self._say = run, allocation, say
        shown = zip_longest(added.numbers, added.credentials)
        self._each = {n: replace(endpoint, host=n, credentials=own) for n, own in shown}
        self._launcher, self._logs = launcher, run / "logs"
        self._hosts = HostWatch(launcher, self._each, self._each.__getitem__, self._logs)
        own = replace(endpoint, credentials=added.own)
        hello = Hello(token=own.token, role="client", number=added.client, pid=os.getpid())
        self._connection = MasterConnection(own.address, hello, own.context)
        self._asked = self._told = 0  # how often to leave, and how often the master was told

    def serve(self) -> None:
        """Until the run is over, or continues without these hosts."""
        connection = self._connection
        connection.lasting = True
        connection.keep()
        connection.listen(Heartbeat, lambda _: None)
        try:
            with on_signals(self._ask_to_leave, *SCHEDULERS):
                for endpoint in self._each.values():
                    self._launcher.start(endpoint, self._logs)
                while self._asked < 2 and self._turn():
                    time.sleep(LOOK_S)
        finally:
            connection.close()

    def _ask_to_leave(self, *_: object) -> None:
        self._asked += 1

    def _turn(self) -> bool:
        """One look; whether to continue."""
        while (message := self._connection.inbox.poll()) is not None:
            match message:
                case Over():
                    self._say("the run is over")
                    return False
                case Leave():
                    self._say("left the run, which goes on")
                    return False
                case HostsJoined(workers=workers, missing=missing):
                    self._show(workers, missing)
                case Refused():
                    raise PeerError("it goes on without these nodes.")
                case HostWanted() if is_over(self._allocation):
                    self._asked = max(self._asked, 1)
                case HostWanted(numbers=numbers):
                    self._hosts.start(numbers)
        for event in self._hosts.events():
            self._connection.send(event)
        if self._asked > self._told:
            self._told = self._asked
            self._say("leaving the run, once its workers have left these nodes")
            self._connection.send(RemoveHosts())
        return True

    def _show(self, workers: int, missing: Collection[int]) -> None:
        there = [name for number, name in self._names.items() if number not in missing]
        if there:
            more = plural(workers, "worker")
            self._say(f"{', '.join(there)} joined {self._run} with {more} more")
        if missing:
            names = ", ".join(self._names[number] for number in missing)
            at = f"{self._address.host}, port {self._address.port}"
            self._say(
                f"{names} did not connect to the run's master at {at} so far. Can they reach "
                f"it? Each says more in {self._logs}."
            )
