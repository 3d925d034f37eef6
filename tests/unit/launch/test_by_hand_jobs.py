"""Jobs with `[cluster]`: which launcher they have, and what is wrong with one."""

import socket

import pytest

from instep.client.job_checks import check_job
from instep.errors import SpecError
from instep.launch.by_hand import ByHandLauncher
from instep.spec_file import absolute, build, dump, load

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
    assert load(path).cluster.token_file == str(tmp_path / "cluster.token")


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
        ({"master": "198.18.9.9:1"}, {}, 'not encrypted.* set network = "private"'),
        ({"master": "198.18.9.9:1"}, {"network": "private"}, "nothing can listen there"),
        ({"master": "no such name:1"}, {}, "leads to no address"),
        ({}, {"launch": {"on": "by_hand", "nodes": 2}}, "launch.nodes = 2 with launch.on"),
    ],
)
def test_an_address_that_nobody_should_listen_on_is_refused(tmp_path, cluster, more, text):
    with pytest.raises(SpecError, match=text):
        ByHandLauncher.of(job({"token_file": str(tmp_path / "token"), **cluster}, **more))


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        given = job({"token_file": str(tmp_path / "token"), "master": master})
        with pytest.raises(SpecError, match=f"{master}: nothing can listen there"):
            ByHandLauncher.of(given)
