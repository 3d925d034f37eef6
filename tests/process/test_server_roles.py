"""What a user sees of parameter servers: names, logs, lines, and where a killed one starts."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started, kill, newest_pids

from instep.cli import main
from instep.lab.chaos.run_processes import roles_of
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

ON_THREE_HOSTS = (
    'network = "private"',
    '[launch]\nhosts = ["env HOST=1", "env HOST=2", "env HOST=3"]\naddress = "127.0.0.1"',
)


def begin(
    start: Start, folder: Path, workers: int, servers: int, top: str = "", rest: str = ""
) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "net"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = {workers}\n'
        f"seed = 5\n{top}\n[train]\nsteps = 400\nglobal_batch = 16\n[data]\nloaders = 1\n"
        f'[sync]\nname = "server_sync"\nservers = {servers}\n[arguments]\npause_s = 0.004\n{rest}\n'
    )
    return start("-m", "instep", "run", job)


def roles(program: Started) -> dict[int, str]:
    return {int(e["worker"]): str(e["role"]) for e in program.events("worker_joined")}


@pytest.mark.slow
def test_servers_have_names_logs_and_lines_of_their_own_and_stay_when_workers_change(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = begin(start, tmp_path, 1, 2)
    program.until(program.is_training, "training")
    assert roles(program) == {0: "worker", 1: "server", 2: "server"}
    pids = newest_pids(program)
    names = {number: psutil.Process(pid).name() for number, pid in pids.items()}
    assert names == {0: "instep-worker", 1: "instep-server", 2: "instep-server"}
    assert {e["worker"] for e in program.events("loaders_started")} == {0}
    assert main(["scale", str(program.run), "--workers", "2"]) == 0
    assert "2 workers from one of the next steps on; the 2 servers stay" in capsys.readouterr().out
    program.until(lambda: len(program.events("generation_started")) > 1, "scaled")
    assert program.events("generation_started")[-1]["members"] == [0, 3, 1, 2]
    assert newest_pids(program).items() >= pids.items()
    os.kill(pids[2], signal.SIGTERM)  # it stays: what it holds is of its number
    kill(pids[1])
    program.until(lambda: newest_pids(program)[1] != pids[1], "replaced")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130, program.stderr
    assert sorted(e["worker"] for e in program.events("worker_joined")) == [0, 1, 1, 2, 3]
    assert "continuing with workers 0, 3, servers 1, 2 (server 1 was lost: " in program.stderr
    assert "2 workers and 2 servers" in program.stdout
    run = RunFolder(program.run)
    assert {"worker", "server", "loader"} <= {*roles_of(run)}
    logs = {path.name for path in (program.run / "logs").iterdir()}
    assert logs >= {"worker-0.log", "server-1.log", "server-2.log", "worker-3.log"}
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_killed_server_starts_on_the_host_where_its_memory_lies(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, 1, 1, *ON_THREE_HOSTS)
    program.until(program.is_training, "training")
    pids = newest_pids(program)
    os.kill(pids[0], signal.SIGTERM)  # its successor is on host 2, and host 0 has nothing then
    program.until(lambda: bool(program.events("process_ended")), "moved")
    kill(pids[1])
    program.until(lambda: newest_pids(program)[1] != pids[1], "replaced")
    places = [(e["worker"], e["host"]) for e in program.events("worker_joined")]
    assert sorted(places) == [(0, 0), (1, 1), (1, 1), (2, 2)]
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130, program.stderr
