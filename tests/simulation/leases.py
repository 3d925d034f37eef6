"""Games of leases: workers pause, die, come back and push twice, and servers take over.

python tests/simulation/leases.py --games 1500 --from 0
"""

from __future__ import annotations

import argparse
import random
import sys

from instep.sync.servers.leases import Leases, Unit

LIMIT_S = 12.0


class World:
    """Workers with clocks of their own, who pause, die, come back, and push twice.

    It keeps its own record of what counts, in the plainest way.
    """

    def __init__(self, seed, *, staleness, workers, steps, most=3, slow=0.01, replaced=0.0):
        self.draw = random.Random(seed)
        self.steps, self.staleness = steps, staleness
        self.sizes = [self.draw.randint(1, most) for _ in range(97)]
        self.leases = Leases(self.units, staleness=staleness)
        self.leases.stop_after(steps)
        self.done = {}  # unit to version
        self.counts = {}  # step to committed units
        self.whole = 0  # all steps up to it are complete
        self.working = {}  # worker to (its lease, when it is done)
        self.waiting = set(range(workers))
        self.away = set()  # had a lease of a server that was lost, and notice it late
        self.late = []  # pushes that will come once more, or too late
        self.now, self.turned_away, self.servers = 0.0, 0, 0
        self.slow = slow  # how likely a unit takes long
        self.replaced = replaced  # how likely a turn begins with another server

    def units(self, step):
        return self.sizes[step % len(self.sizes)]

    def commit(self, token):
        committed = self.leases.push(token)
        if committed is None:
            self.turned_away += 1
            return
        unit = committed.lease.unit
        assert unit not in self.done, f"{unit} counts twice"
        self.done[unit] = committed.version
        assert committed.version == len(self.done)
        assert committed.lag == committed.version - 1 - committed.lease.version >= 0
        self.counts[unit.step] = self.counts.get(unit.step, 0) + 1
        while self.counts.get(self.whole + 1) == self.units(self.whole + 1):
            self.whole += 1
        assert self.leases.complete == self.whole

    def ask(self, worker):
        lease = self.leases.lease(worker, self.now, LIMIT_S)
        if lease is None:
            self.waiting.add(worker)
            return
        assert lease.unit not in self.done
        if self.staleness is not None:
            assert self.whole >= lease.unit.step - self.staleness - 1, "beyond the bound"
        self.waiting.discard(worker)
        slow = self.draw.random() < self.slow
        seconds = self.draw.expovariate(0.1) if slow else self.draw.uniform(0.5, 1.5)
        self.working[worker] = lease, self.now + seconds

    def replace_server(self):
        """The server is lost, with all leases; some workers never notice, and push too late."""
        before, told = self.leases, self.draw.choice([0, 0, 3])
        step = max(0, before.complete - told)
        self.leases = Leases(
            self.units,
            staleness=self.staleness,
            step=step,
            beyond=[unit for unit in self.done if unit.step > step],
            version=before.version,
            first_token=before._token,
        )
        assert self.leases.complete == before.complete
        assert self.leases.begun <= before.begun
        self.leases.stop_after(self.steps)
        self.late += [lease.token for lease, _ in self.working.values()]
        self.away |= self.working.keys()
        self.working.clear()
        self.servers += 1

    def turn(self):
        if self.draw.random() < self.replaced:
            self.replace_server()
        back = {worker for worker in sorted(self.away) if self.draw.random() < 0.3}
        if not (self.working or self.waiting or back):
            back = set(self.away)
        self.waiting |= back
        self.away -= back
        for worker in sorted(self.waiting):
            self.ask(worker)
        if not self.working:  # what is left was leased to workers that died unseen
            self.now += 1.001 * LIMIT_S
            for worker in sorted(self.waiting):
                self.ask(worker)
        assert self.working, "nobody has anything to do, and the run is not over"
        worker = min(self.working, key=lambda each: self.working[each][1])
        lease, self.now = self.working.pop(worker)
        chance = self.draw.random()
        if chance < 0.01:  # it dies, and its end is seen; what it sent may still arrive
            self.leases.leave(worker)
            self.late.append(lease.token)
        elif chance < 0.02:  # it dies unseen; another comes in its place, under its number or not
            self.late.append(lease.token)
            worker = worker if chance < 0.015 else 1000 + self.draw.randrange(10**6)
        else:
            self.commit(lease.token)
            if chance > 0.98:
                self.late.append(lease.token)
        if self.late and self.draw.random() < 0.3:
            self.commit(self.late.pop(self.draw.randrange(len(self.late))))
        self.waiting.add(worker)

    def run(self):
        while self.whole < self.steps:
            self.turn()
            if len(self.waiting) + len(self.working) > 8:  # some leave for good
                gone = self.draw.choice(sorted(self.waiting or self.working))
                self.waiting.discard(gone)
                self.working.pop(gone, None)
        return self


def check(world, *, late=True):
    wanted = {Unit(s, n) for s in range(1, world.steps + 1) for n in range(world.units(s))}
    assert world.done.keys() == wanted
    assert sorted(world.done.values()) == list(range(1, len(wanted) + 1))
    assert world.leases.beyond == []
    assert world.turned_away or not late
    assert world.leases.version == len(wanted)


def play(seed):
    """One game to its end: servers are replaced every few turns; the world afterwards."""
    draw = random.Random(seed)
    world = World(
        seed,
        staleness=draw.choice([0, 1, 2, 7, None]),
        workers=draw.randint(2, 6),
        steps=60,
        most=draw.randint(2, 6),
        slow=0.1,
        replaced=draw.choice([0.02, 0.1]),
    )
    check(world.run(), late=False)
    return world


def main(argv=None):
    """Parse, play, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--games", type=int, default=1500, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first")
    asked = parser.parse_args(argv)
    failed, servers = 0, 0
    for seed in range(asked.first, asked.first + asked.games):
        try:
            servers += play(seed).servers
        except AssertionError as broken:
            failed += 1
            print(f"game {seed}: {broken}", flush=True)
    print(f"{asked.games} games of leases, {servers} servers replaced; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
