"""Groups of gloo through forwarders: the same sums, nothing readable on the way, nobody else in."""

import datetime
import json
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
import torch
from test_tls import WRONG, answer_to, copy, showing
from torch._C._distributed_c10d import HashStore, Store

from instep.comm.encryption import forwarder, forwarding, tls
from instep.comm.encryption.certificates import Authority, Credentials, Identity
from instep.comm.encryption.forwarder import Forwarder
from instep.comm.encryption.forwarding import inside
from instep.comm.torch_comm import TorchComm
from instep.errors import PeerError

SIZE = 100_000


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def forwarders(authority):
    """A forwarder of each worker, on hosts as named."""
    made = []

    def start(*hosts, roles=None, issue=authority.issue):
        for number, host in enumerate(hosts):
            shown = issue(Identity(roles[number] if roles else "worker", number))
            made.append(Forwarder(number, "127.0.0.1", shown, host))
        for each in made:
            each.begin("group")
        return list(made)

    yield start
    for each in made:
        each.close()
    for each in made:
        each._process.wait(600)


class Through(Store):
    """A store as `ChannelStore` is, without a master."""

    def __init__(self, store, forwarder, change=lambda left: left):
        super().__init__()
        self._store, self._forwarder, self._change = store, forwarder, change

    def set(self, key, value):
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._change(self._forwarder.leave("group", data)))

    def get(self, key):
        return self._forwarder.take("group", bytes(self._store.get(key)))

    def wait(self, keys, timeout=None):
        self._store.wait(keys)

    def set_timeout(self, timeout):
        pass


def on_ranks(forwarders, work, change=lambda left: left, timeout_s=600.0):
    """What each rank's function returns; each has a group of gloo."""
    store, size = HashStore(), len(forwarders)

    def rank(number):
        through = Through(store, forwarders[number], change)
        address = forwarders[number].inside
        comm = TorchComm(through, number, size, address=address, timeout_s=timeout_s)
        with ExitStack() as stack:
            stack.callback(comm.close)
            result = work(comm)
            comm.all_reduce(torch.zeros(1)).wait()  # none closes while another still reads
            return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def total(comm):
    tensor = torch.arange(SIZE, dtype=torch.float32) * (comm.rank + 1)
    comm.all_reduce(tensor).wait()
    return tensor


@pytest.mark.grid(2)
@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abab"])
def test_the_sum_is_that_of_one_machine(forwarders, hosts):
    expected = torch.arange(SIZE, dtype=torch.float32) * sum(range(1, len(hosts) + 1))
    for result in on_ranks(forwarders(*hosts), total):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_messages_and_parts_arrive_too_in_both_directions(forwarders):
    def work(comm):
        got = torch.empty(SIZE)
        to, of = torch.full((SIZE,), float(comm.rank)), 1 - comm.rank
        both = [comm.send(to, of), comm.receive(got, of)]
        for each in both:
            each.wait()
        parts = torch.empty(2 * SIZE)
        comm.all_gather(parts, to).wait()
        return got, parts

    (first, parts), (second, again) = on_ranks(forwarders("a", "b"), work)
    assert first.eq(1).all()
    assert second.eq(0).all()
    assert torch.equal(parts, again)
    assert torch.equal(parts, torch.cat([torch.zeros(SIZE), torch.ones(SIZE)]))


def test_a_second_group_forms_after_the_first_is_forgotten(forwarders):
    both = forwarders("a", "b")
    on_ranks(both, total)
    for each in both:
        each.begin("group of another generation")
        each.begin("group")
    on_ranks(both, total)


def test_a_lost_forwarder_breaks_the_group_and_the_next_group_has_another(forwarders):
    both = forwarders("a", "b")

    def work(comm):
        total(comm)
        if comm.rank == 0:
            both[0]._process.kill()
        while True:
            total(comm)

    with pytest.raises(PeerError, match="went away"):
        on_ranks(both, work)
    both[0]._process.wait(600)
    for each in both:
        each.begin("group")
    on_ranks(both, total)


# ---- what crosses the link


class Tap:
    """Stands between the forwarders, and copies all that crosses."""

    def __init__(self):
        self.seen, self._ends, self._ways = bytearray(), [], []

    def between(self, data):
        """What a rank has left in the store, so that its forwarder is reached through this."""
        left, listener = decode(data), socket.create_server(("127.0.0.1", 0))
        self._ends.append(listener)
        self._start(self._accept, listener, left.port)
        left.port = listener.getsockname()[1]
        return msgspec.msgpack.encode(left)

    def _start(self, target, *arguments):
        self._ways.append(threading.Thread(target=target, args=arguments))
        self._ways[-1].start()

    def _accept(self, listener, port):
        with suppress(OSError):  # it is closed
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                self._ends += near, far
                self._start(self._copy, near, far)
                self._start(self._copy, far, near)

    def _copy(self, source, target):
        with suppress(OSError):
            copy(source, target, self.seen)

    def close(self):
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for way in self._ways:
            way.join(600)


def decode(data):
    return msgspec.msgpack.decode(data, type=forwarder._Left)


@pytest.fixture
def tap():
    tap = Tap()
    yield tap
    tap.close()


def test_no_byte_of_a_tensor_can_be_read_between_the_forwarders(forwarders, tap):
    value = 12345.678

    def work(comm):
        tensor = torch.full((SIZE,), value if comm.rank == 0 else 0.0)
        comm.broadcast(tensor)
        return tensor

    results = on_ranks(forwarders("a", "b"), work, change=tap.between)
    assert all(result.eq(value).all() for result in results)
    assert len(tap.seen) > 4 * SIZE
    assert struct.pack("=2f", value, value) not in tap.seen
    assert socket.inet_aton(inside(0)) not in tap.seen
    assert b"instep" not in tap.seen


# ---- who is refused


def heard_from(port, made, after=b""):
    """What a forwarder tells a caller after its first answer, until it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as connection:
        return answer_to(connection, made)


@pytest.mark.grid(4)
@pytest.mark.parametrize("what", [*WRONG, "a host's", "a client's"])
def test_before_proof_every_refusal_is_the_same_and_says_nothing(authority, forwarders, what):
    (one,) = forwarders("a")
    others = {
        "a host's": lambda run: showing(run.issue(Identity("host")).own),
        "a client's": lambda run: showing(run.issue(Identity("client")).own),
    }
    assert heard_from(one._known_port(), {**WRONG, **others}[what](authority)) == b""


def test_a_worker_reaches_no_port_that_was_not_left_in_the_store(authority, forwarders):
    (one,) = forwarders("a")
    shown = tls.context(authority.issue(Identity("worker", 1)), server=False)
    address = ("127.0.0.1", one._known_port())
    with socket.create_server((inside(0), 0)) as private:
        private.settimeout(0.5)
        port = private.getsockname()[1]
        with shown.wrap_socket(socket.create_connection(address, 600)) as secured:
            secured.sendall(struct.pack("!H", port))
            assert secured.recv(1) == b""
        with pytest.raises(TimeoutError):
            private.accept()
        one.leave("group", forwarder._sockaddr(0, port))  # now it was
        with shown.wrap_socket(socket.create_connection(address, 600)) as secured:
            secured.sendall(struct.pack("!H", port) + b"bytes")
            near, _ = private.accept()
            with near:
                assert near.recv(100) == b"bytes"


AT_ITS_PLACE = {
    "its own": lambda run: run.issue(Identity("worker", 1)),
    "another worker's": lambda run: run.issue(Identity("worker", 7)),
    "a host's": lambda run: run.issue(Identity("host", 1)),
    "another run's": lambda run: Credentials(
        Authority().issue(Identity("worker", 1)).own, run.certificate
    ),
    "an expired one": lambda run: run.issue(
        Identity("worker", 1), lasts=datetime.timedelta(seconds=-1)
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("what", AT_ITS_PLACE)
def test_who_listens_in_the_place_of_a_workers_forwarder_gets_no_byte(authority, forwarders, what):
    (one,) = forwarders("a")
    context = tls.context(AT_ITS_PLACE[what](authority), server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, gloo = listener.getsockname(), forwarder._sockaddr(1, 4567)
        left = forwarder._Left(1, "b", *address, gloo)
        (port,) = forwarder._ports(one.take("group", msgspec.msgpack.encode(left)), 1)
        with socket.create_connection((inside(1), port), 600) as near:
            near.sendall(b"a secret")
            far, _ = listener.accept()
            got = b""
            with suppress(OSError), context.wrap_socket(far, server_side=True) as secured:
                got = secured.recv(2) + secured.recv(100)
    assert got == (struct.pack("!H", 4567) + b"a secret" if what == "its own" else b"")


def test_callers_that_say_nothing_keep_no_worker_out(forwarders):
    both = forwarders("a", "b")
    with ExitStack() as strangers:
        for each in both:
            for _ in range(500):
                address = ("127.0.0.1", each._known_port())
                strangers.enter_context(socket.create_connection(address, 600))
        for _ in range(20):  # on a busy machine a proof comes late; a run makes another group, too
            with suppress(PeerError):
                on_ranks(both, total, timeout_s=60.0)
                return
            for each in both:
                each.begin("another group")
                each.begin("group")
    pytest.fail("no group was formed")


def test_callers_from_machines_without_a_worker_get_a_small_part_of_a_forwarder(
    authority, forwarders
):
    """Each handshake that they begin costs it a signature. Workers are served at once meanwhile."""
    both = forwarders("a", "b")
    on_ranks(both, total)  # from now on each knows where the other is
    made = showing(Authority().issue(Identity("worker", 1)).own)
    accepts = tls.context(authority.issue(Identity("worker", 0)), server=True)

    def step_s():
        """How long a forwarder takes to go on with a handshake."""
        theirs = tls.Tls(accepts, server=True, accepted=lambda _: True)
        data = tls.Tls(made, server=False, accepted=lambda _: True).begin()
        began = time.perf_counter()
        theirs.open(data)
        return time.perf_counter() - began

    def answered(seconds):
        """How many handshakes of strangers the first forwarder goes on with; and in how long."""
        count, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            ours = tls.Tls(made, server=False, accepted=lambda _: True)
            with socket.create_connection(
                ("127.0.0.1", both[0]._known_port()), 60, source_address=("127.0.0.9", 0)
            ) as caller:
                caller.sendall(ours.begin())
                count += bool(caller.recv(1))
        return count, time.monotonic() - began

    answered(0.5)  # more than it gives at once
    with ThreadPoolExecutor(1) as pool:
        strangers = pool.submit(answered, 0.5)
        for each in both:
            each.begin("another group")
            each.begin("group")
        on_ranks(both, total)
        count, seconds = strangers.result()
    least_s = min(step_s() for _ in range(20))  # the least: other programs want the cores too
    assert 0 < count < 3 + 2 * forwarding.STRANGERS * seconds / least_s


def test_the_limit_on_callers_outlives_a_time_without_files(authority):
    program = (
        "from instep.comm.encryption import forwarding\n"
        "forwarding.PROOF_S, forwarding.MOST_UNPROVEN = 3600.0, 8\n"
        "forwarding.serve(0, 1)"
    )
    shown = asdict(authority.issue(Identity("worker", 0)))
    note = {"credentials": shown, "address": "127.0.0.1", "number": 0}
    command = [sys.executable, "-P", "-c", program]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        process.stdin.write(json.dumps(note).encode() + b"\n")
        process.stdin.flush()
        address = ("127.0.0.1", int(process.stdout.readline()))

        def callers(count):
            made = [socket.create_connection(address, 30) for _ in range(count)]
            for each in made:
                stack.enter_context(each)
            return made

        some = len(list(Path(f"/proc/{process.pid}/fd").iterdir())) + 5
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (some, some + 1000))
        waiting, dropped = callers(12), 0
        while dropped < 10:  # as it can open files for five
            ready, _, _ = select.select(waiting, [], [], 30)
            assert ready
            dropped += len(ready)
            waiting = [each for each in waiting if each not in ready]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (some + 1000, some + 1000))
        for each in waiting:
            each.close()
        oldest, *_ = callers(9)
        assert oldest.recv(1) == b""
