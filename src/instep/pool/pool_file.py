"""The file of a pool, and the folder that a pool has. Ways in: `pool_of`, `PoolFolder`."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import msgspec

from instep import detached
from instep.errors import RunError, SpecError
from instep.job.file import read_table
from instep.plain_file import read_plain, replace_plain
from instep.pool.hosts.demand import idle_s
from instep.pool.jobs import (
    ENDED,
    FlowSubmitted,
    HostSpec,
    JobSubmitted,
    PoolHost,
    PoolSpec,
    PoolState,
)
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import pending
from instep.units import bytes_in, host_and_port
from instep.words import listed

SPEC = "pool.json"

CERTIFICATES = "certificates"
"""The folder of the certificates of hosts, in that of a pool."""

_HOST = re.compile(r"[A-Za-z0-9._:-]{1,80}")


def pool_of(path: Path) -> PoolSpec:
    """Read a pool's file.

    Raises:
        SpecError: it is not what a pool can be.
    """
    try:
        spec = msgspec.convert(read_table(path, "pool file"), PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path} is not the file of a pool: {error}.") from None
    for share in (*spec.shares, *spec.limits):
        if not share.isprintable():
            raise SpecError(
                f"{path}: share {share!r}: has a line break or a control character. Leave it out."
            )
    for share, weight in spec.shares.items():
        if not 1e-6 <= weight <= 1e6:
            raise SpecError(
                f"{path}: shares.{share} = {weight}: a weight needs to be from 0.000001 to 1000000."
            )
    if "\0" in spec.runs:
        raise SpecError(f"{path}: runs: has a NUL character, which no folder's name has.")
    for share, limit in spec.limits.items():
        if limit.workers < 1:
            raise SpecError(f"{path}: limits.{share}.workers needs to be at least 1.")
    if spec.cores < 0:
        raise SpecError(f"{path}: cores = {spec.cores}: needs to be at least 1, or 0 for all.")
    _check_hosts(path, spec)
    return msgspec.structs.replace(spec, runs=str((path.parent / spec.runs).resolve()))


def _check_hosts(path: Path, spec: PoolSpec) -> None:
    """Refuse hosts that cannot join, or that are said twice."""
    if bool(spec.hosts) != bool(spec.listen):
        raise SpecError(
            f"{path}: hosts and listen belong together: [hosts.NAME] for each host, and where they "
            "reach this machine, such as listen = '10.0.0.5:2220'."
        )
    if not spec.hosts:
        return
    if spec.cores:
        raise SpecError(
            f"{path}: cores = {spec.cores} is for a pool without hosts. Give cores in each "
            "[hosts.NAME]; this machine may be one of them, with start = 'env'."
        )
    try:
        address, _ = host_and_port(spec.listen)
    except ValueError as error:
        raise SpecError(f"{path}: listen: {error}.") from None
    if address in ("0.0.0.0", "::", "[::]", "*"):
        raise SpecError(
            f"{path}: listen = {spec.listen!r} means every address of this machine. Give the one "
            "that the hosts reach."
        )
    for name, host in spec.hosts.items():
        if not _HOST.fullmatch(name):
            raise SpecError(
                f"{path}: hosts.{name!r}: a name has letters, digits, '.', '_', ':' and '-' only, "
                "80 at most."
            )
        if host.cores < 1:
            raise SpecError(f"{path}: hosts.{name}.cores needs to be at least 1.")
        try:
            _host(host)
        except ValueError as error:
            raise SpecError(f"{path}: hosts.{name}.memory: {error}.") from None
        try:
            idle_s(host)
        except ValueError as error:
            raise SpecError(f"{path}: hosts.{name}.idle: {error}.") from None
        if host.idle and not host.start:
            raise SpecError(
                f"{path}: hosts.{name}.idle = {host.idle!r} is for a host that the scheduler "
                "starts. Give start, such as 'ssh node2', or leave idle out."
            )
        if host.start and not _is_command(host.start):
            raise SpecError(
                f"{path}: hosts.{name}.start = {host.start!r}: is no command. Give one that runs "
                "another command there, such as 'ssh node2'."
            )


def _is_command(text: str) -> bool:
    try:
        return bool(shlex.split(text)) and text.isprintable()
    except ValueError:  # a quotation mark that is alone
        return False


def _host(spec: HostSpec) -> PoolHost:
    memory = bytes_in(spec.memory) if spec.memory else 0
    on_demand = bool(spec.idle)
    return PoolHost(cores=spec.cores, memory=memory, local=is_local(spec), on_demand=on_demand)


def is_local(spec: HostSpec) -> bool:
    """Whether a host is the machine of the scheduler: its `start` is `env`, with variables at most.

    That runs another command where it is run itself.
    """
    words = shlex.split(spec.start) if _is_command(spec.start) else []
    return words[:1] == ["env"] and all("=" in word for word in words[1:])


class PoolFolder:
    """The folder of a pool.

    Args:
        folder: of it; there may be none yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs = folder / "jobs"
        self.lock, self.log = folder / "scheduler.lock", folder / "scheduler.log"
        self.certificates = folder / CERTIFICATES

    def make(self, spec: PoolSpec) -> None:
        """Make the folder, or change what its pool is.

        Raises:
            RunError: hosts that it had are not there, or have other numbers; or it gets its first
                ones, and has jobs for this machine alone; or it cannot be written.
        """
        is_there = (self.folder / SPEC).exists()
        before = [*self.spec.hosts] if is_there else []
        if [*spec.hosts][: len(before)] != before:
            raise RunError(
                f"the pool in {self.folder} has the hosts {', '.join(before)}: new ones are "
                "named after these. To take one out: instep pool drain HOST"
            )
        if is_there and spec.hosts and not before:
            still = [job.id for job in self.state().jobs.values() if job.status != ENDED]
            if still:
                raise RunError(
                    f"the pool in {self.folder} has no hosts yet, and was given {listed(still, 3)} "
                    "for this machine alone. Let that end, or cancel it, or start another pool "
                    "with --pool."
                )
        self.jobs.mkdir(parents=True, exist_ok=True)
        (self.folder / "inbox").mkdir(exist_ok=True)
        if not Path(spec.runs).is_absolute():
            runs = str((self.folder.parent / spec.runs).resolve())
            spec = msgspec.structs.replace(spec, runs=runs)
        try:
            replace_plain(self.folder / SPEC, msgspec.json.encode(spec), durable=True)
        except OSError as error:
            raise RunError(
                f"{self.folder / SPEC} cannot be written: {error.strerror}. Make room, or get "
                "access to it."
            ) from None

    @property
    def spec(self) -> PoolSpec:
        """The cores, shares and limits of the pool.

        Raises:
            RunError: there is no pool.
        """
        try:
            spec = msgspec.json.decode(read_plain(self.folder / SPEC), type=PoolSpec)
            for host in spec.hosts.values():
                _host(host)
            return spec
        except FileNotFoundError:
            raise RunError(
                f"there is no pool in {self.folder}. Start one: instep pool start"
            ) from None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise RunError(f"{self.folder / SPEC} cannot be read: {error}.") from None

    @property
    def runs(self) -> Path:
        """Folder of the runs of its jobs."""
        return Path(self.spec.runs)

    @property
    def empty(self) -> PoolState:
        """The state of the pool without its jobs."""
        spec = self.spec
        limits = {share: limit.workers for share, limit in spec.limits.items()}
        hosts = {name: _host(host) for name, host in spec.hosts.items()}
        cores = sum(h.cores for h in hosts.values()) or spec.cores or os.cpu_count() or 1
        return PoolState(cores=cores, weights=spec.shares, limits=limits, hosts=hosts)

    def state(self) -> PoolState:
        """The pool as it is journaled, with requests that nobody has taken.

        Raises:
            RunError: there is no pool, or it cannot be read.
        """
        state = self.empty
        if (self.folder / "pool.sqlite").exists():
            journal = PoolJournal(self.folder, write=False)
            try:
                state = journal.load(state)
            finally:
                journal.close()
        jobs = dict(state.jobs)
        for _, request in pending(self.folder):
            if isinstance(request, JobSubmitted):
                jobs.setdefault(request.job.id, request.job)
            elif isinstance(request, FlowSubmitted):
                for job in request.jobs:
                    jobs.setdefault(job.id, job)
        return msgspec.structs.replace(state, jobs=jobs)

    def joining(self) -> dict[str, str]:
        """By host, the command with which it joins; of those that the scheduler does not start."""
        spec, folder = self.spec, self.certificates
        return {
            name: f"instep host --join {spec.listen} --token-file {folder}/host-{n}.token --stay"
            for n, (name, host) in enumerate(spec.hosts.items())
            if not host.start
        }

    @property
    def scheduled(self) -> bool:
        """Whether its scheduler lives."""
        return detached.lives(self.lock)
