"""A run on emulated hosts: whoever is cut off writes nothing more, and the result does not show."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started, kill, newest_pids
from test_recovery import check_same_result, undisturbed
from test_survival import STEPS_OF_A_RUN, reach

import instep
from instep.lab import netlab

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NO = netlab.why_not()
needs_hosts = pytest.mark.skipif(NO is not None, reason=str(NO))
pytestmark = pytest.mark.process

__all__ = ["undisturbed"]  # the fixture


@pytest.fixture
def network() -> Iterator[netlab.Network]:
    with netlab.Network(3) as made:
        yield made


def begin(
    start: Start,
    folder: Path,
    hosts: list[str],
    address: str,
    workers: int,
    *more: str,
    recipe: str = "slow_tiny.py",
) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / recipe}:recipe"\n'
        f'workers = {workers}\nseed = 5\nnetwork = "private"\n'
        f'[train]\nsteps = {STEPS_OF_A_RUN}\nglobal_batch = 16\ndeterminism = "bits"\n'
        "validate_every = 40\n[checkpoint]\nevery = 25\n"
        f'[launch]\nhosts = {json.dumps(hosts)}\naddress = "{address}"\n'
    )
    sets = [word for setting in more for word in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def on(
    start: Start,
    folder: Path,
    network: netlab.Network,
    workers: int,
    recipe: str = "slow_tiny.py",
) -> Started:
    hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
    address = network.address(netlab.OUTSIDE)
    return begin(start, folder, hosts, address, workers, recipe=recipe)


def lost_hosts(program: Started) -> list[int]:
    return [e["host"] for e in program.events("host_lost")]


def check_no_process_is_left(program: Started) -> None:
    program.check_no_process_is_left()
    program.check_no_file_is_left()


@needs_hosts
@pytest.mark.parametrize(
    "away",
    [["h3"], ["h1", "h2"]],
    ids=["one of five", "four of five"],
)
@pytest.mark.slow
def test_the_side_with_the_master_continues_whether_larger_or_smaller(
    start: Start, tmp_path: Path, network: netlab.Network, undisturbed: Path, away: list[str]
) -> None:
    program = on(start, tmp_path, network, 5)
    program.until(program.is_training, "training")
    reach(program, 40)
    network.partition(away)
    program.until(lambda: len(program.events("generation_started")) > 1, "going on without them")
    time.sleep(1)  # the others look for the master meanwhile
    network.heal()
    program.until(lambda: len(program.events("host_joined")) >= 3 + len(away), "whole again")
    assert program.end() == 0, program.stderr
    assert {f"h{number + 1}" for number in lost_hosts(program)} >= set(away)
    sizes = [len(e["members"]) for e in program.events("generation_started")]
    left = 4 if away == ["h3"] else 1  # they train on if the replacements take long to get ready
    assert sizes[0] == sizes[-1] == 5
    assert set(sizes) <= {5, left}
    assert program.events("went_back") == []
    causes = [e["cause"] for e in program.events("worker_lost")]
    assert len(causes) >= (1 if away == ["h3"] else 4)
    assert all("gave no sign of life" in c and "nor did its host" in c for c in causes)
    check_same_result(program, undisturbed)
    check_no_process_is_left(program)


@needs_hosts
@pytest.mark.slow
def test_one_worker_that_the_master_still_reaches_trains_on_and_the_four_others_write_nothing(
    start: Start, tmp_path: Path, network: netlab.Network, undisturbed: Path
) -> None:
    """The side with the master continues, however small, though no replacement gets ready there."""
    program = on(start, tmp_path, network, 5, "builds_slowly.py")
    program.until(program.is_training, "training")
    reach(program, 40)
    hold = program.work / "hold"
    hold.touch()
    network.partition(["h1", "h2"])

    def groups() -> list[list[int]]:
        return [e["members"] for e in program.events("generation_started")]

    program.until(lambda: len(groups()) > 1, "in a group of one")
    assert len(groups()[-1]) == 1
    reach(program, int(program.ledger["step"].max()) + 20)
    network.heal()
    program.until(lambda: len(program.events("host_joined")) >= 5, "whole again")
    hold.unlink()
    assert program.end() == 0, program.stderr
    assert len(groups()[-1]) == 5
    assert program.events("went_back") == []
    check_same_result(program, undisturbed)
    check_no_process_is_left(program)


@needs_hosts
@pytest.mark.slow
def test_a_master_that_is_cut_off_from_all_waits_for_them_and_no_step_is_lost(
    start: Start, tmp_path: Path, network: netlab.Network, undisturbed: Path
) -> None:
    program = on(start, tmp_path, network, 3)
    program.until(program.is_training, "training")
    reach(program, 40)
    network.cut(*network.hosts)
    program.until(lambda: len(lost_hosts(program)) == 3, "cut off")
    network.heal()
    reach(program, 100)
    assert program.events("worker_lost") == []

    (host,) = (e["pid"] for e in program.events("host_joined")[-3:] if e["host"] == 1)
    workers = set(newest_pids(program).values())
    spares = [p.pid for p in psutil.Process(host).children() if p.pid not in workers]
    for pid in (*spares, host):
        kill(pid)
    program.until(lambda: program.events("host_joined")[-1]["pid"] != host, "another host")
    assert program.end() == 0, program.stderr
    assert program.events("went_back") == []
    check_same_result(program, undisturbed)
    check_no_process_is_left(program)


@needs_hosts
@pytest.mark.slow
def test_a_newcomer_that_has_part_of_the_state_leaves_the_group_if_its_source_is_killed(
    start: Start, tmp_path: Path, network: netlab.Network
) -> None:
    program = on(start, tmp_path, network, 3, "heavy.py")
    program.until(program.is_training, "training")
    reach(program, 10)
    network.slow("h1", "20mbit")  # 16 MB take seconds
    pids = newest_pids(program)
    kill(pids[1])
    program.until(lambda: len(program.events("generation_started")) == 2, "another generation")
    time.sleep(2)  # worker 0, on the slow host, gives its state meanwhile
    kill(pids[0])
    network.slow("h1", None)
    assert program.end() == 0, program.stderr
    assert [e["worker"] for e in program.events("worker_lost")] == [1, 0]
    assert program.events("went_back") == []
    check_no_process_is_left(program)


@pytest.mark.slow
def test_hosts_may_be_on_one_machine_and_a_worker_that_is_lost_starts_where_the_fewest_are(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, ["env HOST=1", "env HOST=2"], "127.0.0.1", 3)
    program.until(program.is_training, "training")
    places = {e["worker"]: e["host"] for e in program.events("worker_joined")}
    assert sorted(places.values()) == [0, 0, 1]
    alone = next(worker for worker, host in places.items() if host == 1)
    reach(program, 60)
    kill(newest_pids(program)[alone])
    assert program.end() == 0, program.stderr
    assert program.events("worker_joined")[-1]["host"] == 1
    check_same_result(program, undisturbed)
    program.check_nothing_is_left()


@pytest.mark.tail
def test_hosts_that_cannot_be_begun_end_the_run_with_what_they_said(
    start: Start, tmp_path: Path
) -> None:
    hosts = ["sh -c 'echo no way to host 1 >&2; exit 3'", "sh -c 'exit 4'"]
    program = begin(start, tmp_path, hosts, "127.0.0.1", 2)
    assert program.end() == 5
    assert "ended with code" in program.error
    program.check_no_process_is_left()


@needs_hosts
@pytest.mark.slow
def test_workers_that_reach_the_master_and_not_each_other_are_told_of_and_waited_for(
    start: Start, tmp_path: Path, network: netlab.Network, undisturbed: Path
) -> None:
    """A route between two hosts is gone for a while."""
    program = on(start, tmp_path, network, 2)
    program.until(program.is_training, "training")
    reach(program, 30)
    route = ("blackhole", network.address("h2"))
    network.run("h1", ["ip", "route", "add", *route]).wait()
    program.until(lambda: "all ports between their hosts" in program.stderr, "told of")
    network.run("h1", ["ip", "route", "del", *route]).wait()
    assert program.end() == 0, program.stderr
    assert len([e for e in program.events("warning") if "ports" in e["text"]]) == 1
    check_same_result(program, undisturbed)
    check_no_process_is_left(program)


@pytest.mark.tail
def test_hosts_with_another_version_end_the_run_at_once_with_what_to_install(
    start: Start, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(instep.__file__).parent, other / "instep")
    file = other / "instep" / "comm" / "protocol" / "process_messages.py"
    text, count = re.subn(r"^VERSION = .*$", "VERSION = 1", file.read_text(), flags=re.M)
    assert count == 1
    file.write_text(text)
    hosts = [f"env HOST={n} PYTHONPATH={other}" for n in range(2)]
    program = begin(start, tmp_path, hosts, "127.0.0.1", 2)
    assert program.end() == 5
    assert "has another version of instep than the run. Install the same one" in program.error
    program.check_no_process_is_left()


@needs_hosts
@pytest.mark.long
def test_in_fifty_partitions_at_most_one_side_ever_moves(start: Start, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    program = start(BENCHMARKS / "partitions.py", "--partitions", 50, "--json", result)
    assert program.end() == 0, program.stderr
    found = json.loads(result.read_text())
    assert found["partitions"] == 50
    assert found["partitions_in_which_both_sides_moved"] == 0
    assert found["repeated_samples"] == found["missing_samples"] == found["went_back"] == 0
    assert found["same_bits_as_undisturbed"]
    program.check_no_process_is_left()
