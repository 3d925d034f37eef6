"""What becomes of a process's own connections while groups form and are given up."""

import socket
import subprocess
import sys
import threading

import pytest
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import HashStore

from instep.comm.torch_comm import TorchComm
from instep.errors import PeerError


class Busy(Store):
    """A store during whose calls the user's code opens a connection of its own."""

    def __init__(self, store):
        super().__init__()
        self.store, self.pairs = store, []

    def opens(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            self.pairs += [(near, server.accept()[0]), socket.socketpair()]

    def set(self, key, value):
        self.opens()
        self.store.set(key, value)

    def get(self, key):
        self.opens()
        return self.store.get(key)

    def wait(self, keys, timeout=None):
        self.store.wait(keys)

    def set_timeout(self, timeout):
        pass


@pytest.fixture
def formed():
    """Two ranks in this process, each with the connections that were opened meanwhile."""
    shared, comms = HashStore(), {}
    stores = [Busy(shared), Busy(shared)]

    def form(rank):
        comms[rank] = TorchComm(stores[rank], rank, 2)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [comms[0], comms[1]], [pair for store in stores for pair in store.pairs]
    for comm in comms.values():
        comm.close()
    for store in stores:
        for pair in store.pairs:
            for end in pair:
                end.close()


@pytest.mark.process
def test_an_interrupt_ends_the_groups_connections_and_no_others(formed):
    comms, pairs = formed
    assert len(pairs) >= 4
    work = comms[0].all_reduce(torch.ones(3))  # which the other rank does not join
    comms[0].interrupt()
    with pytest.raises(PeerError):
        work.wait()
    for near, far in pairs:
        near.sendall(b"still here")
        assert far.recv(64) == b"still here"


NO_MEMORY = """
import resource
from torch.distributed import HashStore
from instep.comm.torch_comm import TorchComm
from instep.errors import PeerError
resource.setrlimit(resource.RLIMIT_AS, (10 << 20, 10 << 20))
try:
    TorchComm(HashStore(), 0, 1)
except PeerError as error:
    print(error.mine, error)
"""


def test_a_process_that_gets_no_more_memory_says_that_it_is_the_cause_itself():
    said = subprocess.check_output([sys.executable, "-c", NO_MEMORY], text=True)
    assert said == "True the group of 1 workers did not form: Resource temporarily unavailable\n"


def test_a_member_that_never_connects_is_not_blamed_on_those_that_wait():
    with pytest.raises(PeerError, match="did not form") as caught:
        TorchComm(HashStore(), 0, 2, timeout_s=0.2)
    assert not caught.value.mine


def test_a_message_may_come_later_than_ranks_may_take_to_meet():
    """By itself gloo would wait for it for a fifth of that time, and give the group up."""
    shared, comms = HashStore(), {}

    def form(rank):
        comms[rank] = TorchComm(shared, rank, 2, timeout_s=5.0)

    threads = [threading.Thread(target=form, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = torch.zeros(1)
    late = threading.Timer(1.5, lambda: comms[1].send(torch.ones(1), 0).wait())
    late.start()
    comms[0].receive(got, 1).wait()
    late.join()
    assert got.item() == 1.0
    for comm in comms.values():
        comm.close()
