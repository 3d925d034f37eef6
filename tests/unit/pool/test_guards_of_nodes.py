"""What runs a command on a node of a cluster ends with all that came of it."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from instep.errors import SpecError
from instep.launch.join_folder import JoinFolder
from instep.pool.hosts.host_gate import GONE, HostGate
from instep.pool.jobs import HostAway, HostSeen, HostSpec, PoolHost, PoolState
from instep.pool.on_ray.actor import NodeCommand
from instep.pool.on_ray.guard import LEAVE, STOP
from instep.pool.on_ray.run import _others, _packed, main


@pytest.fixture
def guarded(tmp_path):
    """A guard that runs a command; its orders, and a folder that it removes."""
    started = []

    def start(script):
        orders, writes = os.pipe()
        (folder := tmp_path / "removed").mkdir()
        command = ["sh", "-c", script.replace("FOLDER", str(tmp_path))]
        guard = [sys.executable, "-m", "instep.pool.on_ray.guard", str(orders), str(folder)]
        process = subprocess.Popen([*guard, *command], stdout=subprocess.PIPE, pass_fds=(orders,))
        os.close(orders)
        started.append((process, writes))
        while not (tmp_path / "pids").exists():
            time.sleep(0.01)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        found = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):  # the command itself may have ended
                found.append(psutil.Process(pid))
        return process, writes, found, folder

    yield start
    for process, _ in started:
        process.kill()
        process.wait()
        process.stdout.close()


STARTS = "setsid sleep 600 & echo $! $$ > FOLDER/part; mv FOLDER/part FOLDER/pids; "


def test_all_that_a_command_started_ends_with_whoever_gives_orders(guarded):
    process, writes, found, folder = guarded(STARTS + "sleep 600")
    os.close(writes)
    assert process.wait() == 0
    assert not psutil.wait_procs(found, timeout=600)[1]
    assert not folder.exists()


def test_a_guard_stays_until_nothing_is_left_and_tells_the_end_of_the_command_before(guarded):
    process, writes, found, folder = guarded(STARTS + "exit 3")
    assert process.stdout.readline() == b"3\n"
    assert process.poll() is None
    assert folder.exists(), "what still runs may need it"
    found[0].kill()
    assert process.wait() == 0
    assert folder.exists(), "the next command may need it"
    os.close(writes)


@pytest.mark.parametrize(("order", "code"), [(LEAVE, b"5\n"), (STOP, b"6\n")])
def test_an_order_is_a_signal_for_the_command_alone(guarded, order, code):
    traps = "trap 'exit 5' USR1; trap 'echo no code; exit 6' TERM; "
    process, writes, found, _ = guarded(traps + STARTS + "while :; do sleep 0.01; done")
    os.write(writes, order)
    assert process.stdout.readline() == code
    found[0].kill()
    assert process.wait() == 0
    os.close(writes)


def test_a_node_runs_a_command_with_its_files_and_python_and_the_same_one_once(
    tmp_path, monkeypatch
):
    ended = list[object]()
    monkeypatch.setattr(NodeCommand, "_end_if_over", lambda self: ended.append(self))
    node = NodeCommand()
    script = f"import os, shutil; shutil.copy('{{files}}/a', {str(tmp_path / 'copy')!r})"
    mode = "oct(os.stat('{files}/a').st_mode)"
    script += f"; print({mode}, file=open({str(tmp_path / 'mode')!r}, 'w'))"
    assert node.run(["{python}", "-c", script + "; raise SystemExit(5)"], {"a": b"secret"}) == 5
    assert (tmp_path / "copy").read_bytes() == b"secret"
    assert (tmp_path / "mode").read_text() == "0o100600\n"
    while not ended:
        time.sleep(0.01)
    node.leave()  # nobody is there any more
    assert node.run(["sh", "-c", "ls {files}"], {}) == 0
    while len(ended) < 2:
        time.sleep(0.01)
    assert Path(node._folder, "a").exists(), "commands have one folder, one after another"
    shutil.rmtree(node._folder)


def test_the_words_for_a_node_have_its_python_and_no_path_of_this_machine(tmp_path, monkeypatch):
    token, bought = tmp_path / "host-0.token", list[Path]()
    token.write_bytes(b"t")

    def buy(gate, path):
        bought.append(path)
        path.with_name("host-0.token.certificate").write_bytes(b"c")

    monkeypatch.setattr("instep.pool.on_ray.run.credentials", buy)
    words = [sys.executable, "-m", "instep", "host", "--join", "10.0.0.5:2220"]
    found, files = _packed([*words, "--token-file", str(token), "--stay"])
    assert found[0] == "{python}"
    assert found[-3:] == ["--token-file", "{files}/host-0.token", "--stay"]
    assert files == {"host-0.token": b"t", "host-0.token.certificate": b"c"}
    assert bought == [token]
    assert _packed(["sleep", "5"]) == (["sleep", "5"], {})


def test_resources_need_a_name_and_an_amount():
    assert _others(["tpu=2", "disk=0.5"]) == {"tpu": 2.0, "disk": 0.5}
    with pytest.raises(SpecError, match=r"--resource tpu: needs a name and an amount"):
        _others(["tpu"])


def test_where_no_cluster_is_one_sentence_says_so(capsys):
    pytest.importorskip("ray")
    assert main(["127.0.0.1:1", "--cpus", "1", "--", "true"]) == SpecError.exit_code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error no Ray cluster at '127.0.0.1:1'")


def test_a_command_that_says_so_means_that_its_machine_and_all_there_is_gone(tmp_path):
    folder = JoinFolder(tmp_path / "certificates")
    folder.prepare(2)
    spec = {
        n: HostSpec(cores=1, start=f"sh -c '{c}'")
        for n, c in (("a", f"touch ${GONE}"), ("b", "false"))
    }
    gate = HostGate(("127.0.0.1", 0), spec, folder, lambda text: None)
    gate.start_missing(
        tmp_path / "hosts", PoolState(cores=2, hosts={n: PoolHost(cores=1) for n in "ab"})
    )
    for process in gate._own.values():
        process.wait()
    assert [*gate.gone(tmp_path / "hosts")] == [HostSeen("a", {}, leaving=True), HostAway("a")]
    assert [*gate.gone(tmp_path / "hosts")] == []
    assert (tmp_path / "hosts" / "0.gone").exists(), "another scheduler may have to read it"
    gate.noted()
    assert not (tmp_path / "hosts" / "0.gone").exists()
    (tmp_path / "hosts" / "0.gone").mkdir()  # nothing that the command has made
    assert [*gate.gone(tmp_path / "hosts")] == []
    gate.close()
