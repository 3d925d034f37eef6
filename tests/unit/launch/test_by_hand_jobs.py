"""Jobs with `[cluster]`: which launcher they have, and what is wrong with one."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from instep.client.job_checks import check_job
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import JoinError, SpecError
from instep.job.file import absolute, build, dump, load
from instep.launch.by_hand import ByHandLauncher
from instep.launch.joining import Machine, _start
from instep.launch.local import LocalLauncher
from instep.store.folder import host_log

CLUSTER = {"master": "127.0.0.1:2220", "workers": ["a:1", "b:1"]}


def job(cluster=(), **more):
    table = {"recipe": "a.py:a", "cluster": {**CLUSTER, **dict(cluster)}, **more}
    return build(table, source="a test")


def test_a_cluster_is_joined_by_hand_unless_the_job_says_otherwise(tmp_path):
    assert job().launch.on == "by_hand"
    assert job(launch={"on": "local"}).launch.on == "local"
    path = tmp_path / "job.toml"
    path.write_text(dump(absolute(job(), tmp_path)))
    assert load(path, ["launch.on=local"]).launch.launcher == "local"
    assert load(path).cluster.certificates == str(tmp_path / "certificates")


def test_hosts_for_servers_are_counted_after_those_for_workers():
    given = job({"servers": ["c:1", "a:2"]}, sync={"name": "server_sync"})
    assert list(given.server_hosts) == [2, 3]
    assert given.cluster.places == ("a:1", "b:1", "c:1", "a:2")
    assert not job({"servers": ["c:1"]}, launch={"on": "local"}).server_hosts


@pytest.mark.parametrize(
    ("cluster", "more", "text"),
    [
        ({"workers": []}, {}, r"workers is empty: name a machine"),
        ({"workers": ["a"]}, {}, r"workers has 'a': needs a machine and a port from 1 to 65535"),
        ({"workers": ["a:0"]}, {}, r"workers has 'a:0'"),
        ({"servers": [":1"]}, {}, r"servers has ':1'"),
        ({"master": ""}, {}, r"master has ''"),
        ({"servers": ["b:1"]}, {}, r"'b:1' is named twice. Give each its own port"),
        ({}, {"network": "private", "launch": {"hosts": ["env"]}}, r"cluster.workers and launch"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused(cluster, more, text):
    with pytest.raises(SpecError, match=text):
        job(cluster, **more)


def test_by_hand_needs_machines():
    with pytest.raises(SpecError, match="but \\[cluster\\] names no machines"):
        build({"recipe": "a.py:a", "launch": {"on": "by_hand"}}, source="a test")


def test_servers_need_a_strategy_that_has_them():
    with pytest.raises(SpecError, match="all_reduce has no servers"):
        check_job(job({"servers": ["c:1"]}))


@pytest.mark.parametrize(
    ("cluster", "more", "text"),
    [
        ({"master": "0.0.0.0:1"}, {}, "every address of this machine"),
        ({"master": "198.18.9.9:1"}, {}, "nothing can listen there"),
        ({"master": "no such name:1"}, {}, "leads to no address"),
        ({}, {"launch": {"on": "by_hand", "nodes": 2}}, "launch.nodes = 2 with launch.on"),
    ],
)
def test_an_address_that_nobody_should_listen_on_is_refused(tmp_path, cluster, more, text):
    with pytest.raises(SpecError, match=text):
        ByHandLauncher.of(job({"certificates": str(tmp_path / "c"), **cluster}, **more))


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        given = job({"certificates": str(tmp_path / "c"), "master": master})
        with pytest.raises(SpecError, match=f"{master}: nothing can listen there"):
            ByHandLauncher.of(given)


def test_what_a_machine_lacks_is_in_the_log_of_its_host(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = {"certificates": str(tmp_path / "c"), "workers": ["127.0.0.1:1"]}
    given = job({**cluster, "master": f"127.0.0.1:{port}"})
    launcher, address = ByHandLauncher.of(given), Address("127.0.0.1", port)
    machine = Machine(address, tmp_path / "c" / "host-0.token", print)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(machine._try)
        launch = launcher.settled(given.launch)
        channel, place = joining.result()
    try:
        assert place == "127.0.0.1:1"
        assert (launch.nodes, launch.address) == (1, "127.0.0.1")
        launcher.start(Endpoint(address, "secret", 0), tmp_path)
        order = channel.receive()
        lacks = msgspec.structs.replace(order, needs={**order.needs, "sha256": "another"})
        missing = _start(LocalLauncher(), lacks)
        assert missing.startswith("does not have the recipe's file a.py.")
        channel.send(m.HostEnded(code=2, detail=f"this machine {missing}"))
        deadline = time.monotonic() + 600
        while launcher.ended() is None:
            assert time.monotonic() < deadline
        assert launcher.ended() == 2
        assert host_log(tmp_path, 0).read_text() == f"this machine {missing}\n"
    finally:
        channel.close()
        launcher.stop()


def test_a_run_that_is_given_up_while_machines_are_missing_is_no_run_to_those_that_are_there(
    tmp_path,
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cluster = {"certificates": str(tmp_path / "c"), "workers": ["127.0.0.1:1"]}
    given = job({**cluster, "master": f"127.0.0.1:{port}"})
    launcher = ByHandLauncher.of(given)
    machine = Machine(Address("127.0.0.1", port), tmp_path / "c" / "host-0.token", print)
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(machine.serve)
        launcher.settled(given.launch)
        launcher.stop()
        assert serving.result(600) == 0


def test_a_machine_waits_for_its_first_run_no_longer_than_it_is_told(tmp_path):
    said = []
    machine = Machine(Address("127.0.0.1", 1), tmp_path / "token", said.append, wait_s=0.0)
    with pytest.raises(JoinError, match=r"the run at 127\.0\.0\.1:1 is gone"):
        machine.serve()
