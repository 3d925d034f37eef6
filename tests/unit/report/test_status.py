"""`instep list`, `status` and `logs`: what a folder of runs says, also while one runs."""

import json
import threading
import time

import pytest

from instep.cli import main
from instep.errors import RunError, SpecError
from instep.report.figures.summary import summarise
from instep.report.terminal.status import Status
from instep.store.folder import held, is_running
from instep.store.run_folder import RunFolder
from made_up_runs import make_run


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "whole")
    make_run(tmp_path / "cut", steps=20, outcome=None)
    for name in ("whole", "cut"):
        (tmp_path / name / "run.id").write_text(name)
    return tmp_path


def answer(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_ended_has_the_figures_of_its_summary(runs, capsys):
    (found,) = answer(capsys, "status", runs / "whole")
    summary = summarise(RunFolder(runs / "whole"))
    assert found["state"] == "completed"
    assert found["step"] == summary["steps"] == 48
    assert found["validation"] == summary["metrics"]
    assert found["workers"] == {"0": "done", "1": "done"}
    assert found["samples_per_s"] > 0
    assert main(["status", str(runs / "whole")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"completed   {runs / 'whole'}\n")
    assert "epoch 3/3  step 48" in shown
    assert f"\nnext    instep report {runs / 'whole'}\n        instep export" in shown


def test_of_a_run_that_was_killed_nothing_trains(runs):
    found = Status(runs / "cut")
    state, *lines = found.lines(100, "ascii")
    assert state.startswith("unfinished")
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[1:3] for row in rows] == [["ended", "-"], ["ended", "-"]]
    for word in ("training  ", "eta", "running", " ago", "━"):
        assert word not in "\n".join(lines)
    table = found.as_table()
    assert (table["eta_s"], table["samples_per_s"]) == (None, 0)


def test_a_run_counts_as_running_as_long_as_its_folder_is_locked(runs, capsys):
    assert [each["state"] for each in answer(capsys, "list", runs)[0]] == [
        "unfinished",
        "completed",
    ]
    with held(runs / "cut"):
        assert is_running(runs / "cut")
        (found,) = answer(capsys, "status", runs / "cut")
        assert found["state"] == "running"
        assert found["step"] == 20
        assert main(["status", str(runs / "cut")]) == 0
        shown = capsys.readouterr().out
        assert f"next    instep logs {runs / 'cut'} --follow\n" in shown
        assert f"        instep scale {runs / 'cut'} --workers N\n" in shown
        states = {each["name"]: each["state"] for each in answer(capsys, "list", runs)[0]}
    assert states == {"cut": "running", "whole": "completed"}
    assert not is_running(runs / "cut")
    assert main(["status", str(runs / "cut")]) == 0
    assert f"next    instep resume {runs / 'cut'}\n" in capsys.readouterr().out


def test_who_looks_whether_a_run_runs_does_not_keep_it_from_starting(runs):
    over = threading.Event()

    def look():
        while not over.is_set():
            is_running(runs / "cut")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with held(runs / "cut"):
                pass
    finally:
        over.set()
        looking.join()


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs, capsys):
    (runs / "cut" / "job.toml").write_text("no = [")
    assert main(["list", str(runs)]) == 0
    shown = capsys.readouterr()
    assert "whole   completed" in shown.out
    assert "cut cannot be read" in shown.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["list", "{}/nowhere"], RunError.exit_code, "there is no folder"),
        (["list", "{}/whole/logs"], RunError.exit_code, "there is no run in"),
        (["list", "{}/whole"], RunError.exit_code, "is a run itself: instep status"),
        (["status", "{}"], RunError.exit_code, "is not the folder of a run"),
        (["logs", "{}"], RunError.exit_code, "is not the folder of a run"),
        (["logs", "{}/nope"], RunError.exit_code, "there is no run at"),
        (["logs", "{}/whole", "worker-9"], SpecError.exit_code, "'worker-9' has no log there"),
    ],
)
def test_what_is_no_run_is_said(runs, capsys, words, code, said):
    assert main([word.format(runs) for word in words]) == code
    assert said in capsys.readouterr().err


def test_logs_are_lines_with_the_name_of_their_process(runs, capsys):
    (runs / "whole" / "logs" / "host.log").write_text("host\n")
    (runs / "whole" / "logs" / "worker-1.log").write_bytes(b"one\n\xff two, without an end")
    assert main(["logs", str(runs / "whole")]) == 0
    shown = capsys.readouterr().out
    assert shown == "host      host\nworker-1  one\nworker-1  \ufffd two, without an end\n"
    assert answer(capsys, "logs", runs / "whole", "host") == [{"of": "host", "line": "host"}]


def test_logs_are_followed_until_the_run_ends(runs, capsys):
    log = runs / "cut" / "logs" / "worker-0.log"
    log.write_text("first\nha")

    def write():
        with held(runs / "cut"), log.open("a") as file:
            locked.set()
            for text in ("lf\n", "last\nend"):
                time.sleep(0.3)
                file.write(text)
                file.flush()

    locked = threading.Event()
    writing = threading.Thread(target=write)
    writing.start()
    locked.wait()
    assert main(["logs", str(runs / "cut"), "--follow"]) == 0
    writing.join()
    lines = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["first", "half", "last", "end"]
