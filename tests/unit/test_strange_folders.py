"""Folders that others have made or damaged: one sentence, and nothing that moves a terminal."""

import os
import sys
import unicodedata

import pytest

from instep.cli import main
from instep.errors import RunError, SpecError
from instep.events import read_events
from instep.job.file import MOST_DEPTH, read_table
from instep.state.export.hugging_face import kept_config
from instep.state.files.model_file import open_tensors
from made_up_runs import failure, make_run, write_events

STRANGE = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e\ud800\x7f"
"""Changes a title, clears a screen, goes back in a line, turns its direction, is no text."""


def strange(value):
    """The same with such characters in every text, and in keys that are the user's own names."""
    if isinstance(value, str):
        return value + STRANGE
    if isinstance(value, list):
        return [strange(each) for each in value]
    if isinstance(value, dict):
        return {key: strange(each) for key, each in value.items()}
    return value


@pytest.fixture
def poisoned(tmp_path):
    made = make_run(tmp_path / "runs" / "digits", steps=21, outcome="failed")
    path = made.rename(made.with_name("digits\x1b[31m\udcff"))
    (path / "run.id").write_text("id\n")
    events = [*read_events(path / "events.jsonl"), failure(0.5, 7)]
    kept = {"event", "outcome", "parameters_sha256", "versions", "started_by"}
    events = [{k: v if k in kept else strange(v) for k, v in each.items()} for each in events]
    for each in events:
        if "metrics" in each:
            each["metrics"][f"accuracy{STRANGE}"] = 0.5
    events.append({"time": events[-2]["time"], "event": "warning", "text": STRANGE})
    write_events(path, events)
    (path / "logs").mkdir(exist_ok=True)
    for name in ("worker-0", "worker-1\x1b[2J\n\udcff"):
        log = path / "logs" / f"{name}.log"
        log.write_text(f"a{STRANGE}b\n", "utf-8", "surrogatepass")
    job = (path / "job.toml").read_text()
    assert job.count("[arguments]\n") == 1
    named = '[arguments]\nname = "\\u001B[2J\\u202E"\n'
    (path / "job.toml").write_text(job.replace("[arguments]\n", named))
    return path


@pytest.mark.parametrize("command", ["status", "list", "logs", "report", "audit", "resume"])
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["", "json"])
def test_no_control_character_of_a_run_reaches_a_terminal(poisoned, capsys, command, more):
    code = main([command, str(poisoned.parent if command == "list" else poisoned), *more])
    assert (code == 0) == (command != "resume")
    said = capsys.readouterr()
    shown = said.out + said.err
    assert shown.strip()
    bad = {c for c in shown if unicodedata.category(c)[0] == "C" and c != "\n"}
    assert not bad, f"{bad} in {shown!r}"


def no_log(path, what):
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if what == "device" else __file__)


@pytest.mark.parametrize("what", ["pipe", "device", "link"])
def test_what_is_no_plain_file_is_read_as_no_log(tmp_path, capsys, what):
    path = make_run(tmp_path / "run")
    damaged(path, "run.id", b"id\n")
    damaged(path, "logs/host.log", b"begins\n")
    no_log(path / "logs" / "worker-0.log", what)
    assert main(["logs", str(path)]) == RunError.exit_code
    said = capsys.readouterr()
    assert "begins" in said.out
    assert "worker-0.log cannot be read as a log: it is a" in said.err


@pytest.mark.parametrize("command", ["status", "list", "logs"])
def test_a_pipe_in_place_of_the_id_of_a_run_stops_nobody(tmp_path, capsys, command):
    path = make_run(tmp_path / "run")
    damaged(path, "logs/host.log", b"begins\n")
    no_log(path / "run.id", "pipe")
    main([command, str(tmp_path if command == "list" else path)])
    assert "run.id cannot be tried: it is a named pipe and not a file" in capsys.readouterr().err


def damaged(path, name, content):
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a = " + (MOST_DEPTH + 1) * "[" + (MOST_DEPTH + 1) * "]", f"more than {MOST_DEPTH} deep"),
        ("a." * (MOST_DEPTH + 1) + "b = 1", f"more than {MOST_DEPTH} deep"),
        (f"a = {(sys.get_int_max_str_digits() + 1) * '7'}", "too many digits"),
        ("[train]\nepochs = 99999999999999999999", "needs to fit 64 bits"),
    ],
    ids=["lists", "tables", "digits", "number"],
)
def test_a_job_that_cannot_be_read_is_one_sentence_and_the_others_are_listed(
    tmp_path, capsys, line, said
):
    (make_run(tmp_path / "good") / "run.id").write_text("id\n")
    bad = make_run(tmp_path / "bad")
    (bad / "run.id").write_text("id\n")
    (bad / "job.toml").write_text(f'format = 2\nname = "n"\nrecipe = "a.py:b"\n{line}\n')
    assert main(["status", str(bad)]) == RunError.exit_code
    assert said in capsys.readouterr().err
    assert main(["list", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "good" in shown.out
    assert said in shown.err


def test_a_job_as_deep_as_may_be_is_read(tmp_path):
    inner = MOST_DEPTH - 2
    (tmp_path / "job.toml").write_text(f"[arguments]\na = {inner * '['}{inner * ']'}\n")
    assert read_table(tmp_path / "job.toml")["arguments"]


def test_what_is_too_deep_for_a_library_is_one_sentence_too(tmp_path, monkeypatch):
    def too_deep(*_, **__):
        raise RecursionError("maximum recursion depth exceeded")

    path = make_run(tmp_path / "run")
    damaged(path, "huggingface/config.json", b"{}")
    damaged(path, "model.safetensors", (2).to_bytes(8, "little") + b"{}")
    (path / "job.toml").write_text("name = 'read by nobody before'\n")
    monkeypatch.setattr("instep.job.file.tomllib.loads", too_deep)
    with pytest.raises(SpecError, match="deep"):
        read_table(path / "job.toml")
    monkeypatch.setattr("json.loads", too_deep)
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        kept_config(path)
    monkeypatch.setattr("msgspec.json.decode", too_deep)
    with pytest.raises(Exception, match=r"model\.safetensors") as refused:
        open_tensors(path / "model.safetensors")
    assert not isinstance(refused.value, RecursionError)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"architectures": []}', b'{"architectures": [3]}', b"\xff"]
)
def test_the_export_of_a_damaged_configuration_is_one_sentence(tmp_path, capsys, content):
    path = make_run(tmp_path / "run")
    damaged(path, "huggingface/config.json", content)
    assert main(["export", str(path), "--to", str(tmp_path / "out")]) == RunError.exit_code
    said = capsys.readouterr().err
    assert "config.json is damaged" in said
    assert "--to FILE.safetensors" in said
    assert not (tmp_path / "out").exists()
