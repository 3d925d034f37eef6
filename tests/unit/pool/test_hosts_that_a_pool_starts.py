"""Hosts that a pool has started: through a shell of another machine, and ended with the pool."""

import socket
import sys
import threading
from contextlib import suppress

import pytest
from msgspec.structs import replace

from instep import detached
from instep.comm.protocol.channel import Address
from instep.launch.join_folder import JoinFolder
from instep.launch.joining import Machine
from instep.pool.decide import decide
from instep.pool.hosts.host_gate import HostGate, there
from instep.pool.hosts.placement import BACK_S
from instep.pool.jobs import (
    DrainAsked,
    HostAway,
    HostSeen,
    HostSpec,
    JobSubmitted,
    PlacesTold,
    PoolHost,
    PoolJob,
    PoolState,
    TimePassed,
)
from instep.pool.view import host_lines

SLEEPS = f"{sys.executable} -c 'import time; time.sleep(600)'"


@pytest.fixture
def gate(tmp_path):
    """A gate for a host that somebody starts, one that the pool does, and one that never joins."""
    folder = JoinFolder(tmp_path / "certificates")
    folder.prepare(3)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    starts = {"by-hand": "", "ours": "env", "silent": SLEEPS}
    hosts = {name: HostSpec(cores=1, start=start) for name, start in starts.items()}
    said = []
    made = HostGate(("127.0.0.1", port), hosts, folder, said.append)
    made.folder, made.said = folder, said
    yield made
    made.close()


class Over(Exception):
    """A machine is to end with its test."""


class AttendsNothing:
    over = leaving = False

    def want(self, runs):
        self.wanted = runs

    def turn(self):
        if self.over:
            raise Over
        return {}


def test_what_a_pool_has_started_ends_with_it_and_what_others_have_started_stays(gate, tmp_path):
    ended, threads = list[str](), []
    started = tmp_path / "hosts"
    started.mkdir()

    attends = AttendsNothing()

    def serve(number, name):
        with suppress(Over), detached.holding(started / f"{number}.lock"):
            address = Address("127.0.0.1", int(gate.address.rpartition(":")[2]))
            token_file = gate.folder.token_file(number)
            machine = Machine(address, token_file, lambda text: None, attends)
            machine.serve(stay=True)
            ended.append(name)

    for number, name in enumerate(("by-hand", "ours")):
        threads.append(threading.Thread(target=serve, args=(number, name), daemon=True))
        threads[-1].start()
    state = PoolState(cores=3, hosts={name: PoolHost(cores=1) for name in gate._hosts})
    seen = set()
    while len(seen) < 2:
        seen |= {event.host for event in gate.turn()}
        gate.attend(state, lambda job: "")
    gate._tried["ours"] = float("inf")
    gate.start_missing(started, state)
    lock = started / "2.lock"
    while not detached.has_begun(lock):
        pass
    gate.end_started(started)
    threads[1].join()
    assert ended == ["ours"]
    while detached.lives(lock):
        pass
    assert detached.lives(started / "0.lock"), "somebody else has started it"
    attends.over = True
    threads[0].join()
    (said,) = gate.said
    assert said.startswith("silent: its `instep host` did not answer")


def test_the_words_of_a_command_arrive_as_they_are_through_a_shell_of_another_machine(tmp_path):
    shell = tmp_path / "ssh"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o700)
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "/a b/$HOME/it's", "*"]
    for start in (f"{shell} node2", "env", f"env A=1 {shell} node2"):
        lock, log = tmp_path / "lock", tmp_path / "log"
        log.write_text("")
        process = detached.start_program(there(start, words), lock, log)
        process.wait()
        assert log.read_text() == f"{words[3:]}\n", start


def test_nothing_is_taken_to_be_on_a_host_that_is_drained_and_lost_until_it_says_so():
    state = PoolState(cores=4, hosts={name: PoolHost(cores=2) for name in "ab"})
    net = PoolJob(id="net", share="x", at_least=2, at_most=2)
    state = decide(state, JobSubmitted(net), 1.0)
    state = decide(state, PlacesTold("net", {"a": 2}), 2.0)
    for event in (HostSeen("a", {"net": 2}), DrainAsked("a"), HostAway("a")):
        state = decide(state, event, 3.0)
    state = decide(state, PlacesTold("net", state.jobs["net"].places), 4.0)
    assert state.jobs["net"].places == {"b": 2}
    assert "draining, out of reach since" in host_lines(state)[0], "it may be back in a moment"
    state = decide(state, TimePassed(), 4.0 + BACK_S)
    assert host_lines(state)[0].startswith("host    a: 0 of 2 cores busy, drained, out of reach")
    assert state.held == 2
    back = decide(state, HostSeen("a", {"net": 2}), 20.0)
    assert (back.held, back.hosts["a"].workers) == (4, {"net": 2})
    only_away = replace(state.hosts["a"], drained=False, workers={"net": 2})
    kept = replace(state, hosts={**state.hosts, "a": only_away})
    assert decide(kept, TimePassed(), 99.0).hosts["a"].workers == {"net": 2}, "not said to be lost"
