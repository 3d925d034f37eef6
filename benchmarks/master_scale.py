"""What do many workers cost the master, and how many bytes of control traffic does each take?

    python benchmarks/master_scale.py [--sizes 2 10 100 1000] [--tls 2 100] [--forming 16 64 256]
                                      [--json FILE]

The master is a process of its own, as a run starts it. Hosts and workers are simulated: one process
holds a connection for each, with messages and certificates as a run has them. They say `Hello`, get
`Form`, and send heartbeats at the real rate. No model is trained.

Told are the master's processor seconds in each second, as a share of one core, and
the bytes that a worker sends and receives, TLS included, in each second. The workers send
heartbeats only, and for `--training` also records of steps four times a second, and traffic once.

For `--forming` they exchange addresses before, as the members of a gloo group do, with messages of
the real sizes: how long from the first `Form` until each has those of all, and what the master
takes for it. They do not connect to each other then.

On a busy machine look at the acknowledgements too: where fewer come back than heartbeats leave, the
master got too little of a processor, and its share of a core says little.
"""

import argparse
import contextlib
import datetime
import heapq
import itertools
import json
import os
import platform
import resource
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from instep.comm.encryption.certificates import Authority, Credentials
from instep.comm.encryption.tls import Tls, context
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import LARGEST, Frames, frame
from instep.comm.protocol.connection import HEARTBEAT_S
from instep.comm.protocol.endpoint import Endpoint, Switchboard
from instep.control.journal import Begin, Journal
from instep.engine.membership import FLUSH_S, TRAFFIC_S
from instep.events import STEPS
from instep.job import file as spec_file
from instep.store.folder import BEGINNING, make_run_folder

ON_A_HOST = 8
AT_ONCE_S = 0.02
"""For so long workers are started before heartbeats are sent again."""
LIMIT_S = 240.0
OWN_BYTES, EACH_BYTES = 154, 8
"""Of a member's addresses in a gloo group: its own, and for each member."""
FIRST_PID = 1 << 20
"""Of simulated processes, whose machine the master takes for another one."""


class Client:
    """A simulated process: its connection to the master, and what it has sent and received."""

    def __init__(self, role: str, number: int, endpoint: Endpoint, host: int) -> None:
        self.role, self.number, self.host, self.generation = role, number, host, 0
        self.sent_bytes = self.received_bytes = self.messages = 0
        self.beats = self.acknowledged = 0
        self.tls: Tls | None = None
        self.group, self.size, self.known = "", 0, set[str]()
        self._frames, self._unsent = Frames(LARGEST), bytearray()
        self.socket = socket.create_connection(endpoint.address)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if endpoint.credentials is not None:
            made: ssl.SSLContext = context(endpoint.credentials, server=False)
            self.tls = Tls(made, server=False, accepted=lambda peer: peer.role == "master")
            self._write(self.tls.begin())
        self.send(
            m.Hello(
                token=endpoint.token,
                role=role,
                number=number,
                pid=FIRST_PID + number,
                host=host if role == "worker" else 0,
                machine=f"machine {host}",
                node=f"node-{host}",
            )
        )

    def send(self, message: m.AnyMessage) -> None:
        data = frame(message)
        self.messages += 1
        self._write(data if self.tls is None else self.tls.seal(data))

    def _write(self, data: bytes) -> None:
        self._unsent += data
        self.sent_bytes += len(data)
        self.flush()

    def meet(self, generation: int, rank: int, size: int) -> None:
        """Begin to exchange addresses with the others of a group."""
        self.group, self.size, self.known = f"generation-{generation}/0", size, set()
        value = bytes(OWN_BYTES + EACH_BYTES * size)
        self.send(m.StoreSet(key=f"{self.group}/{rank}", value=value))
        self.ask()

    def ask(self) -> bool:
        """Ask for the next address; whether none is missing."""
        keys = (f"{self.group}/{rank}" for rank in range(self.size))
        key = next((key for key in keys if key not in self.known), None)
        if key is not None:
            self.send(m.StoreGet(key=key, known=len(self.known)))
        return key is None

    def flush(self) -> bool:
        """Send what the socket takes; whether something is left."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        return bool(self._unsent)

    def read(self) -> list[m.AnyMessage]:
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError(f"the master has dropped {self.role} {self.number}.")
        self.received_bytes += len(data)
        if self.tls is not None:
            data, answer = self.tls.open(data)
            self._write(answer)
        return self._frames.feed(data)


class World:
    """A master, and its simulated hosts and workers.

    Args:
        workers: how many.
        encrypted: whether connections are, as by default between machines.
        training: whether workers also send records and traffic.
        forming: whether they exchange addresses before they are in the group.
    """

    def __init__(
        self,
        folder: Path,
        workers: int,
        *,
        encrypted: bool = False,
        training: bool = False,
        forming: bool = False,
    ) -> None:
        self._forming, self._asked_to_form = forming, (0.0, 0.0)
        self.exchange_s = self.exchange_cpu_s = 0.0
        self.workers: dict[int, Client] = {}
        self.formed: set[int] = set()
        self.training = training
        self._hosts: dict[int, Client] = {}
        self._to_start: deque[tuple[int, int, Credentials | None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._count = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None], float]] = []
        hosts = -(-workers // ON_A_HOST)
        job = spec_file.build(
            {
                "name": "scale",
                "recipe": f"{__file__}:recipe",
                "workers": workers,
                "train": {"steps": 10**6, "global_batch": workers, "micro_batches": workers},
                "launch": {"hosts": [f"env HOST={n}" for n in range(hosts)]},
            },
            source="this benchmark",
        )
        self._run = make_run_folder(folder, job, named=False)
        Journal(self._run, Begin(time.time(), BEGINNING)).close()
        self._board = Switchboard(authority=Authority() if encrypted else None)
        self._signs, signs = os.pipe()
        os.set_blocking(self._signs, False)
        self._master = self._start_master(signs)
        os.close(signs)
        self.process = psutil.Process(self._master.pid)
        self.began = time.monotonic()
        try:
            for number in range(hosts):
                self._add_host(number)
            self.until(lambda: len(self.formed) == workers)
        except BaseException:
            self.close()
            raise
        self.forming_s = time.monotonic() - self.began
        self.exchange_cpu_s = self.cpu_s - self._asked_to_form[1]

    def _start_master(self, signs: int) -> subprocess.Popen[bytes]:
        listener = self._board.listener.fileno()
        os.set_inheritable(listener, True)
        master = subprocess.Popen(
            [sys.executable, "-P", "-m", "instep.control.master_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener, signs],
        )
        note = {
            "about": {},
            "nodes": 0,
            "quiet": True,
            "json": False,
            "run": str(self._run),
            "listener": listener,
            "signs": signs,
            "token": self._board.endpoint.token,
            "authority": self._board.authority and self._board.authority.pem,
            "hosted": True,
            "gives_back": False,
            "why": "",
        }
        assert master.stdin is not None
        master.stdin.write(json.dumps(note).encode() + b"\n")
        master.stdin.close()
        return master

    def _add_host(self, number: int) -> None:
        host = Client("host", number, self._board.for_host(number), number)
        self._hosts[number] = host
        self._selector.register(host.socket, selectors.EVENT_READ, host)
        self._repeat(lambda: self._beat(host), HEARTBEAT_S)

    def _add_worker(self, number: int, host: int, credentials: Credentials | None) -> None:
        address, token = self._board.endpoint.address, self._board.endpoint.token
        worker = Client("worker", number, Endpoint(address, token, host, credentials), host)
        self.workers[number] = worker
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _repeat(self, what: Callable[[], None], every_s: float) -> None:
        """Do something again and again, from a moment that differs from that of others on."""
        count = next(self._count)
        first = time.monotonic() + every_s * (count * 0.618 % 1.0)
        heapq.heappush(self._due, (first, count, what, every_s))

    def _beat(self, client: Client) -> None:
        client.beats += 1
        n, role = client.beats, client.role
        if role == "host":
            client.send(m.Heartbeat(number=n))
        else:
            at: Any = {"step": 1 + n // 2, "phase": "backward", "progress": 9 * n, "steps": n // 2}
            client.send(m.Heartbeat(**at, cpu_s=0.19 * n, number=n))

    def _record(self, worker: Client) -> None:
        steps = np.zeros(1, STEPS)
        steps["step"], steps["worker"], steps["begin"] = 1, worker.number, time.time()
        steps["backward_s"] = FLUSH_S
        worker.send(m.Records(ledger=b"", steps=steps.tobytes()))

    def _meter(self, worker: Client) -> None:
        fields = {"worker": worker.number, "sent": 10**9 + worker.beats, "received": 10**9}
        worker.send(m.Emit(name="traffic", fields=fields))

    def _handle(self, client: Client, message: m.AnyMessage) -> None:
        match message:
            case m.StartWorker(number=number, credentials=credentials):
                self._to_start.append((number, client.number, credentials))
            case m.Welcome() if client.role == "worker":
                client.send(m.Built(recovers=True))
            case m.Form(generation=generation, rank=rank, members=members) if self._forming:
                if not self._asked_to_form[0]:
                    self._asked_to_form = time.monotonic(), self.cpu_s
                client.generation = generation
                client.meet(generation, rank, len(members))
            case m.Form(generation=generation):
                self._forms(client, generation)
            case m.StoreValue(key=key, more=more):
                client.known |= {key, *more}
                if client.ask():
                    self._forms(client, client.generation)
            case m.Ack() if client.role == "worker":
                client.acknowledged += 1
            case m.Signal() | m.KillAll() | m.Refused():
                raise RuntimeError(f"the master sent {client.role} {client.number} {message}.")

    def _forms(self, client: Client, generation: int) -> None:
        client.send(m.Formed(generation=generation))
        if client.number in self.formed:
            return
        self.formed.add(client.number)
        self.exchange_s = time.monotonic() - self._asked_to_form[0]
        self._repeat(lambda: self._beat(client), HEARTBEAT_S)
        if self.training:
            self._repeat(lambda: self._record(client), FLUSH_S)
            self._repeat(lambda: self._meter(client), TRAFFIC_S)

    def _step(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, count, what, every_s = self._due[0]
            heapq.heapreplace(self._due, (due + every_s, count, what, every_s))
            what()
        while self._to_start and time.monotonic() - now < AT_ONCE_S:
            self._add_worker(*self._to_start.popleft())
        wait_s = min(self._due[0][0] - now, 0.05) if self._due and not self._to_start else 0.0
        for key, events in self._selector.select(max(0.0, wait_s)):
            client: Client = key.data
            if events & selectors.EVENT_READ:
                for message in client.read():
                    self._handle(client, message)
            left = client.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            if wanted != key.events:
                self._selector.modify(client.socket, wanted, client)
        with contextlib.suppress(BlockingIOError):
            os.read(self._signs, 1 << 16)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > deadline or self._master.poll() is not None:
                raise RuntimeError(
                    f"{len(self.workers)} workers came and {len(self.formed)} formed within "
                    f"{LIMIT_S:g} s; the master {self._master.poll()}."
                )
            self._step()

    def rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the master so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    @property
    def totals(self) -> Counter[str]:
        """Bytes and messages of all workers so far."""
        total: Counter[str] = Counter()
        for worker in self.workers.values():
            total["sent_bytes"] += worker.sent_bytes
            total["received_bytes"] += worker.received_bytes
            total["messages"] += worker.messages
            total["heartbeats"] += worker.beats
            total["acknowledgements"] += worker.acknowledged
        return total

    @property
    def generations(self) -> int:
        """How many the run has had; more than 1 if the master has taken a worker for lost."""
        return (self._run / "events.jsonl").read_text().count('"generation_started"')

    def close(self) -> None:
        self._master.kill()
        self._master.wait()
        for key in list(self._selector.get_map().values()):
            key.data.socket.close()
        self._selector.close()
        self._board.close()
        os.close(self._signs)


@contextlib.contextmanager
def world(workers: int, **how: bool) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as name:
        made = World(Path(name), workers, **how)
        try:
            yield made
        finally:
            made.close()


def one_load(workers: int, seconds: float, *, encrypted: bool, training: bool) -> dict[str, Any]:
    with world(workers, encrypted=encrypted, training=training) as made:
        joined_cpu_s = made.cpu_s
        made.rest(3.0)
        cpu_s, before, began = made.cpu_s, made.totals, time.monotonic()
        made.rest(seconds)
        wall_s, cpu_s = time.monotonic() - began, made.cpu_s - cpu_s
        gone = made.totals - before
        each = {key: gone[key] / wall_s / workers for key in gone}
        if made.generations != 1:
            raise RuntimeError(f"{workers} workers: the run had {made.generations} generations.")
        found = {
            "workers": workers,
            "encrypted": encrypted,
            "training": training,
            "core_share_of_the_master": cpu_s / wall_s,
            "of_each_worker_per_s": {key: round(value, 2) for key, value in each.items()},
            "seconds_until_all_had_formed": made.forming_s,
            "cpu_s_of_the_master_until_then": joined_cpu_s,
        }
        print(
            f"{workers} workers, {'encrypted' if encrypted else 'plain'}, "
            f"{'as in training' if training else 'heartbeats'}: {cpu_s / wall_s:.1%} of a core; "
            f"a worker sends {each['sent_bytes']:.0f} and receives {each['received_bytes']:.0f} "
            f"bytes/s in {each['messages']:.1f} messages ({each['heartbeats']:.1f} heartbeats, "
            f"{each['acknowledgements']:.1f} acknowledged); "
            f"all had formed after {made.forming_s:.1f} s and {joined_cpu_s:.1f} s of the master",
            flush=True,
        )
        return found


def one_group(workers: int) -> dict[str, Any]:
    with world(workers, forming=True) as made:
        totals = made.totals
        found = {
            "members": workers,
            "seconds_of_the_exchange": made.exchange_s,
            "cpu_s_of_the_master": made.exchange_cpu_s,
            "messages_of_each_member": totals["messages"] / workers,
            "megabytes_to_all_members": totals["received_bytes"] / 1e6,
            "generations": made.generations,
        }
    print(
        f"a group of {workers}: all had the addresses of all after {made.exchange_s:.2f} s and "
        f"{made.exchange_cpu_s:.2f} s of the master; a member sent "
        f"{found['messages_of_each_member']:.1f} messages, and all received "
        f"{found['megabytes_to_all_members']:.1f} MB",
        flush=True,
    )
    return found


def load(
    sizes: list[int], tls: list[int], training: list[int], seconds: float
) -> list[dict[str, Any]]:
    return [
        *(one_load(n, seconds, encrypted=False, training=False) for n in sizes),
        *(one_load(n, seconds, encrypted=True, training=False) for n in tls),
        *(one_load(n, seconds, encrypted=False, training=True) for n in training),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="*", type=int, default=[2, 10, 100, 1000])
    parser.add_argument("--tls", nargs="*", type=int, default=[2, 100])
    parser.add_argument("--training", nargs="*", type=int, default=[2, 10, 100])
    parser.add_argument("--forming", nargs="*", type=int, default=[16, 64, 256])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = os.getloadavg()[0]
    found = load(args.sizes, args.tls, args.training, args.seconds)
    groups = [one_group(size) for size in args.forming]
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "load_before": began,
            "load_after": os.getloadavg()[0],
        }
        args.json.write_text(
            json.dumps({**about, "found": found, "groups": groups}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
