"""One contender on its way to a validation loss: a run of ours, or a rival's four processes.

A contender is written as one word: `instep:` and settings as for `--with`, or the name of a rival
(`rivals/to_a_loss.py`), a colon, and its options. `worth_it.py` has the questions. Ways in:
`LOADS`, `race`.
"""

import json
import os
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from instep.client.submit import run_job
from instep.job import file as spec_file
from instep.lab.alternatives import split
from instep.lab.emulated import emulated_hosts, on_hosts
from instep.lab.netlab import Network
from instep.report.figures.outcomes import Outcome, outcome_of
from instep.store.run_folder import RunFolder
from instep.worker.rounds.round_checks import updates

HERE = Path(__file__).resolve().parent
OURS = "instep"
WORKERS, HEADERS = 4, 66
"""Bytes of a packet's headers: Ethernet, IPv4, TCP with timestamps."""

Curve = list[tuple[float, float, float]]
"""Of each validation, seconds since the first step began, without those in which was validated;
samples and loss."""


class Load(NamedTuple):
    """What is trained, until which loss."""

    target: float
    """Nats."""
    batch: int
    """Samples of a step, of all workers."""
    every: int
    """Steps between validations."""
    steps: int
    """The most."""


LOADS = {"mlp": Load(2.55, 128, 10, 300), "gpt": Load(2.4, 32, 20, 900)}


class Racer(NamedTuple):
    """A contender under way."""

    kind: str
    options: dict[str, Any]
    settings: list[str]
    load: str
    lr: float
    seed: int
    steps: int
    network: Network | None
    folder: Path
    python: str
    """Of a rival's environment."""

    @property
    def of(self) -> Load:
        return LOADS[self.load]

    @property
    def workers(self) -> int:
        """One where only the result is asked for, and is known to be the same."""
        plain = (self.kind == OURS and not self.settings) or (
            self.kind == "ddp" and "hook" not in self.options
        )
        return 1 if self.network is None and plain else WORKERS

    def ours(self) -> tuple[Curve, float]:
        """The curve, and the bytes that a worker has sent in the whole run."""
        file = self.folder / "job.toml"
        file.write_text(
            f'name = "race"\nrecipe = "{HERE / "recipes" / "letters.py"}:recipe"\n'
            f"workers = {self.workers}\nseed = {self.seed}\n[stop]\ntarget = {self.of.target}\n"
            f'[arguments]\nmodel = "{self.load}"\nlr = {self.lr}\n'
            f"[train]\nglobal_batch = {self.of.batch}\nmicro_batches = {WORKERS}\nthreads = 1\n"
            'deal = "even"\n'
        )
        job = spec_file.load(file, self.settings)
        local, early = job.local_steps, job.start_after
        length = [f"train.steps={early - (early - self.steps) // local}"]
        length.append(f"train.validate_every={max(1, self.of.every // local)}")
        job = spec_file.load(file, [*self.settings, *length])
        if self.network is not None:
            job = on_hosts(job, self.network)
        run_job(job, self.folder, named=True, quiet=True)
        run = RunFolder(self.folder / "race")
        outcome = outcome_of(run)
        pairs = zip(outcome.curve, run.validations, strict=True)
        curve, stood = list[Any](), 0.0
        for (seconds, loss), each in pairs:
            stood += each["seconds"]
            curve.append((seconds - stood, updates(job, each["step"]) * self.of.batch, loss))
        return curve, outcome.sent_bytes / self.workers

    def rival(self) -> tuple[Curve, float]:
        """The same; without the bytes before the first step, and after the last validation."""
        programs: list[subprocess.Popen[str]] = []
        try:
            environment = {}
            if self.kind == "torchft_diloco":
                serve = ["-m", "rivals.lighthouse", self.address(0), str(WORKERS)]
                programs.append(self.start(0, serve, {}))
                assert programs[0].stdout is not None
                environment["TORCHFT_LIGHTHOUSE"] = programs[0].stdout.readline().strip()
            for number in range(self.workers):
                programs.append(self.start(number, self.worker(number), environment))
            return self.watched(programs)
        finally:
            (self.folder / "over").touch()
            for program in programs:
                end(program)

    def worker(self, number: int) -> list[str]:
        work = {"recipe": "letters", "model": self.load, "lr": self.lr, "seed": self.seed}
        given = {
            "folder": self.folder,
            "rank": number,
            "workers": self.workers,
            "address": self.address(number),
            "steps": self.steps,
            "every": max(self.of.every, self.options.get("local_steps", 1)),
            "work": json.dumps({"global_batch": self.of.batch, **work}),
            "options": json.dumps(self.options),
        }
        words = (f"--{name}={value}" for name, value in given.items())
        return ["-m", "rivals.to_a_loss", self.kind, *words]

    def address(self, number: int) -> str:
        return self.network.address(self.network.hosts[number]) if self.network else "127.0.0.1"

    def start(self, number: int, command: list[str], more: dict[str, str]) -> Any:
        link = "eth0" if self.network else "lo"
        own = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [self.python, *command]
        if self.network:
            space = f"{self.network.name}-{self.network.hosts[number]}"
            command = ["ip", "netns", "exec", space, *command]
        return subprocess.Popen(command, env={**os.environ, **own, **more}, **pipes)

    def watched(self, programs: list[subprocess.Popen[str]]) -> tuple[Curve, float]:
        """Until worker 0 has written enough."""
        file, before, curve = self.folder / "progress", None, list[Any]()
        last = self.steps - self.steps % self.of.every
        while not curve or (curve[-1][2] > self.of.target and curve[-1][1] < last * self.of.batch):
            for program in programs:
                if program.poll():
                    raise SystemExit(f"{self.kind}: a process ended with {program.returncode}")
            time.sleep(0.1)
            if file.exists():
                before = before or self.sent()
                curve = [tuple(json.loads(line)) for line in file.read_text().split("\n")[:-1]]
        assert before is not None
        return curve, (self.sent() - before) / self.workers

    def sent(self) -> float:
        """Bytes by all hosts, without headers."""
        if self.network is None:
            return 0.0
        counted = [self.network.traffic(host) for host in self.network.hosts]
        return float(sum(each.sent_bytes - HEADERS * each.sent_packets for each in counted))


def end(program: subprocess.Popen[str]) -> None:
    """A process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(program.pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    program.communicate()


@contextmanager
def network_at(rate: str | None) -> Iterator[Network | None]:
    with emulated_hosts(WORKERS, rate) if rate else nullcontext() as network:
        yield network


def race(
    contender: str, load: str, lr: float, *, seed: int, steps: int, rate: str | None, python: str
) -> dict[str, Any]:
    """What came of one contender at one learning rate; without limits on the network if no rate."""
    kind, _, rest = contender.partition(":")
    settings = split(rest) if rest else []
    options = {} if kind == OURS else tomllib.loads("\n".join(settings))
    began, of = os.getloadavg()[0], LOADS[load]
    with tempfile.TemporaryDirectory() as folder, network_at(rate) as network:
        how = load, lr, seed, steps or of.steps, network, Path(folder), python
        racer = Racer(kind, options, settings, *how)
        curve, sent = racer.ours() if kind == OURS else racer.rival()

    def until(what: int) -> float | None:
        points = tuple((point[what], point[2]) for point in curve)
        return Outcome(0, 0, 0, None, points).time_to(of.target)

    seconds, samples, loss = curve[-1]
    in_all = until(1)
    return {
        "load": load,
        "target": of.target,
        "contender": contender,
        "lr": lr,
        "rate": rate,
        "seed": seed,
        "seconds": until(0),
        "steps": in_all and in_all / of.batch,
        "seconds_a_step": seconds / samples * of.batch,
        "loss": loss,
        "sent_bytes_a_step": sent / samples * of.batch,
        "load_average": [round(began, 1), round(os.getloadavg()[0], 1)],
        "curve": [[round(s, 2), n, round(value, 4)] for s, n, value in curve],
    }
