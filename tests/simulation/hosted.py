"""A pool over made-up hosts: cut off, lost, drained, while its scheduler and clients are killed.

The scheduler and its decisions are the real ones. Here every process of a worker has a host, and
no host ever has more of them than places. Way in: `hosted_story`.
"""

from __future__ import annotations

import random

from instep.pool.decide import MOST_IN_VAIN
from instep.pool.hosts.placement import BACK_S, all_away
from instep.pool.jobs import (
    ENDED,
    RUNNING,
    WAITING,
    DrainAsked,
    HostAway,
    HostSeen,
    JobSubmitted,
    PoolHost,
    PoolJob,
    PoolState,
)
from instep.pool.paces.curve import speed
from instep.pool.scheduler import LATER, SCALED, JobSight, PoolScheduler
from simulation.pooled import Disk, Killed


class CheckedDisk(Disk):
    """Refuses entries that give what nobody may give."""

    def write(self, event, before, after):
        for job in after.jobs.values():
            was = before.jobs.get(job.id)
            for name, workers in job.places.items():
                more = workers - (was.places.get(name, 0) if was else 0)
                assert more <= 0 or after.hosts[name].away is None, f"{name} is out of reach: {job}"
            if job.status == RUNNING and (was is None or was.status == WAITING):
                here = [n for n, host in after.hosts.items() if host.workers.get(job.id)]
                assert all(after.hosts[n].away is not None for n in here), f"it is there: {job}"
        super().write(event, before, after)


class HostedRun:
    """The run of one job, whose workers are on hosts."""

    def __init__(self, work: float, *, local: bool) -> None:
        self.local = local
        self.left, self.lives, self.outcome = work, False, ""
        self.places: dict[str, int] = {}
        self.on: dict[str, int] = {}
        self.ready_at = self.leaves_at = 0.0
        self.stopping, self.killed, self.starts = False, 0, 0
        self.lost: set[str] = set()

    @property
    def workers(self) -> int:
        return sum(self.on.values())


class MadeUpHosts:
    """All hosts and runs; refuses more workers on a host than there are places."""

    def __init__(self, draw: random.Random, hosts: dict[str, PoolHost], chance: float) -> None:
        self.draw, self.hosts, self.chance, self.now = draw, hosts, chance, 0.0
        self.runs: dict[str, HostedRun] = {}
        self.jobs: dict[str, PoolJob] = {}
        self.back_at: dict[str, float] = {}  # of hosts that the scheduler does not reach
        self.lost: set[str] = set()  # of those that nobody reaches
        self.told: dict[str, dict[str, int]] = {}  # what the scheduler knows of each
        self.drained: set[str] = set()
        self.losses = self.moves = 0

    def seen(self) -> list[HostSeen | HostAway]:
        """What has changed for a scheduler."""
        found: list[HostSeen | HostAway] = []
        for name in self.hosts:
            if name in self.back_at:
                if self.told.pop(name, None) is not None:
                    found.append(HostAway(name))
                continue
            here = {
                i: run.on[name]
                for i, run in self.runs.items()
                if run.on.get(name) and not self.jobs[i].local
            }
            if self.told.get(name) != here:
                self.told[name] = here
                found.append(HostSeen(name, here))
        return found

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._break_hosts()
        for run in self.runs.values():
            if self.now >= run.leaves_at:
                self._leave(run)
            if run.lives:
                self._work(run, seconds)
        self.check()

    def _break_hosts(self) -> None:
        for name, back in [*self.back_at.items()]:
            if self.now >= back:
                del self.back_at[name]
                self.lost.discard(name)
                for run in self.runs.values():
                    run.lost.discard(name)
        for name in self.hosts:
            if name in self.back_at or self.draw.random() > self.chance / 8:
                continue
            self.back_at[name] = self.now + self.draw.choice([1.0, 5.0, 40.0])
            if self.draw.random() < 0.5 and not self.hosts[name].local:
                self.lost.add(name)
                for run in self.runs.values():  # the machine is gone, and so are its processes
                    if run.on.pop(name, 0) and run.lives:
                        run.lost.add(name)
                        self.losses += 1

    def _leave(self, run: HostedRun) -> None:
        """Workers without a place end, where they can hear of it; elsewhere by themselves."""
        wanted = run.places if run.lives else {}
        run.on = {
            name: min(workers, wanted.get(name, 0))
            for name, workers in run.on.items()
            if wanted.get(name, 0) > 0
        }

    def _work(self, run: HostedRun, seconds: float) -> None:
        for name, workers in run.places.items():  # those that were lost, or had no room before
            if name not in self.lost and self.now >= run.ready_at:
                run.on[name] = max(run.on.get(name, 0), workers)
        if self.now >= run.ready_at and run.workers:
            run.left -= seconds * speed(run.workers)
        if run.left <= 0:
            run.outcome = "completed"
            self._end(run)
        elif run.stopping and self.now >= run.leaves_at:
            self._end(run)
        elif self.draw.random() < self.chance / 50:
            run.left, run.killed = run.left + 1.0, run.killed + 1
            self._end(run)

    def _end(self, run: HostedRun) -> None:
        """The client is gone; workers end a moment later."""
        run.lives, run.stopping, run.places = False, False, {}
        run.leaves_at = self.now + self.draw.uniform(0.0, 2.0)
        if run.local:  # they end with it
            run.on = {}

    def check(self) -> None:
        for name, host in self.hosts.items():
            workers = {i: run.on[name] for i, run in self.runs.items() if run.on.get(name)}
            assert sum(workers.values()) <= host.cores, f"{workers} on {name}: {host}"
            assert host.local or not any(self.jobs[i].local for i in workers), (
                f"{workers} on {name}"
            )
            memory = sum(self.jobs[i].memory * each for i, each in workers.items())
            assert memory <= (host.memory or memory), f"{workers} on {name}: {host}"

    # ---- the hands of a scheduler

    def kill_perhaps(self) -> None:
        if self.draw.random() < self.chance:
            raise Killed

    def look(self, job: PoolJob) -> JobSight:
        run = self.runs[job.id]
        begun = run.lives and self.now >= run.ready_at
        lost = tuple(name for name in self.hosts if name in run.lost or not begun)
        lost, begun = ((), True) if job.local else (lost, begun)
        step, left = 100 - int(run.left), run.left * 1.1
        return JobSight(run.lives, run.workers, step, 100, left, run.outcome, "", {}, lost, begun)

    def start(self, job: PoolJob) -> None:
        self.kill_perhaps()
        run = self.runs[job.id]
        assert not run.outcome, "a run that is over is started again"
        assert job.at_least <= sum(job.places.values()) == job.target, "half a gang"
        if not run.lives:
            run.lives, run.starts, run.lost = True, run.starts + 1, set()
            run.places, run.ready_at = dict(job.places), self.now + 1.0
        self.kill_perhaps()

    def scale(self, job: PoolJob) -> str:
        self.kill_perhaps()
        run = self.runs[job.id]
        if self.now < run.ready_at:
            return LATER
        if run.lives and not run.stopping:
            if run.places.keys() - job.places.keys():
                self.moves += 1
            run.places, run.leaves_at = dict(job.places), self.now + self.draw.uniform(0.0, 2.0)
            run.lost -= {name for name in run.lost if name not in job.places}
        return SCALED

    def stop(self, job: PoolJob) -> None:
        self.kill_perhaps()
        run = self.runs[job.id]
        if run.lives and not run.stopping:
            run.stopping, run.leaves_at = True, self.now + self.draw.uniform(0.0, 2.0)


def hosted_story(seed: int) -> dict[str, int]:
    """Jobs of three users on a few hosts, until all have ended.

    Raises:
        AssertionError: a promise was broken.
    """
    draw = random.Random(seed)
    chance = draw.choice([0.0, 0.02, 0.1])
    hosts = {
        f"host-{n}": PoolHost(
            cores=draw.randint(1, 6), memory=draw.choice([0, 8, 16]), local=n == seed % 3
        )
        for n in range(draw.randint(1, 4))
    }
    cores = sum(host.cores for host in hosts.values())
    empty = PoolState(cores=cores, weights={"a": 2.0}, hosts=hosts)
    disk, world, kills = CheckedDisk(draw, chance), MadeUpHosts(draw, hosts, chance), 0
    disk.state = empty
    waiting: list[tuple[float, object]] = []
    for number in range(draw.randint(2, 10)):
        at, least = draw.uniform(0, 80), draw.randint(1, min(3, cores))
        job = PoolJob(
            id=f"job-{number}",
            share=draw.choice("abc"),
            at_least=least,
            at_most=draw.randint(least, 12),
            priority=draw.choice([0, 0, 0, 5]),
            submitted=at,
            memory=draw.choice([0, 0, 2, 4]),
            local=(seed + number) % 4 == 0,
        )
        room = (
            min(h.cores, h.memory // job.memory) if h.memory and job.memory else h.cores
            for h in hosts.values()
            if h.local or not job.local
        )
        if sum(room) < least:
            continue
        world.jobs[job.id], world.runs[job.id] = (
            job,
            HostedRun(draw.uniform(1, 60), local=job.local),
        )
        waiting.append((at, JobSubmitted(job)))
    for _ in range(draw.randint(0, 2)):
        at, name = draw.uniform(0, 60), draw.choice([*hosts])
        waiting += [(at, DrainAsked(name)), (at + draw.uniform(10, 60), DrainAsked(name, False))]
    scheduler = PoolScheduler(all_away(disk.state, world.now), disk, world)
    while waiting or any(job.status != ENDED for job in disk.state.jobs.values()):
        assert world.now < 20_000, f"no end: {disk.state}"
        due = [event for at, event in waiting if at <= world.now]
        try:
            scheduler.turn([*world.seen(), *due], world.now)
            waiting = [each for each in waiting if each[0] > world.now]
        except Killed:
            kills += 1
            world.told.clear()
            scheduler = PoolScheduler(all_away(disk.state, world.now), disk, world)
        check_state(disk.state, world)
        world.pass_time(draw.choice([0.1, 0.5, 2.0]))
    assert disk.state.jobs.keys() == world.jobs.keys(), "a job was lost"
    for job in disk.state.jobs.values():
        run = world.runs[job.id]
        failed = job.outcome == "failed" and run.killed >= MOST_IN_VAIN
        assert failed or (job.outcome, run.outcome) == ("completed", "completed"), job
        assert not run.lives, "a run outlives its job"
    return {"kills": kills, "losses": world.losses, "moves": world.moves}


def check_state(state: PoolState, world: MadeUpHosts) -> None:
    """What holds of each state that is written."""
    given = dict.fromkeys(state.hosts, 0)
    for job in state.jobs.values():
        if job.status == RUNNING:
            assert job.target == sum(job.places.values()), f"places and workers differ: {job}"
            gone = [name for name in world.runs[job.id].lost if name in world.back_at]
            assert job.target >= job.at_least or gone, f"half a gang: {job}"
        for name, workers in job.places.items():
            given[name] += workers
    for name, workers in given.items():
        host = state.hosts[name]
        assert workers <= host.cores, f"{workers} places are given on {name}: {host}"


__all__ = ["BACK_S", "hosted_story"]
