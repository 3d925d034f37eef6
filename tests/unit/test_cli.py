"""What the command line says where something else goes wrong than what it was asked."""

import errno

from instep import cli
from instep.errors import DataError, RunError
from made_up_runs import make_run


def answer(monkeypatch, command):
    monkeypatch.setitem(cli.COMMANDS, "report", cli.COMMANDS["report"]._replace(call=command))
    return cli.main(["report", "runs/x"])


def test_a_file_that_cannot_be_used_is_named_and_is_no_answer(monkeypatch, capsys, tmp_path):
    def command(args):
        tmp_path.write_text("")

    assert answer(monkeypatch, command) == RunError.exit_code
    assert capsys.readouterr().err == f"instep: {tmp_path} cannot be used: Is a directory.\n"


def test_a_connection_that_fails_is_no_answer_either(monkeypatch, capsys):
    def command(args):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    assert answer(monkeypatch, command) == RunError.exit_code
    assert "cannot be used: Network is unreachable" in capsys.readouterr().err


def test_no_error_steers_a_terminal_or_fills_it(monkeypatch, capsys):
    def command(args):
        raise DataError("\x1b[2Jgone\nnext " + "x" * 30_000_000)

    assert answer(monkeypatch, command) == DataError.exit_code
    said = capsys.readouterr().err
    assert said.startswith("instep:  [2Jgone\nnext xx")
    assert len(said) < 5000


def test_a_run_without_a_step_has_nothing_to_report(tmp_path, capsys):
    path = make_run(tmp_path / "digits", steps=0)
    assert cli.main(["report", str(path)]) == RunError.exit_code
    assert "has nothing to report: no step was committed" in capsys.readouterr().err
    assert not (path / "report.html").exists()
