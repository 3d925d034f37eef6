"""What the command line says where something else goes wrong than what it was asked."""

import errno

import pytest

from instep import cli
from instep.cli.parsing import commands_of, make_parser
from instep.errors import DataError, RunError
from made_up_runs import make_run


def answer(monkeypatch, command):
    monkeypatch.setitem(cli.GROUPS["look"], "report", cli.COMMANDS["report"]._replace(call=command))
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "scale runs/x --wrkers 3",
            "no option --wrkers. Did you mean '--workers'? Known to instep",
        ),
        ("run job.toml -w 4", "there is no option -w. Did you mean '--workers'?"),
        ("run job.toml --epochs=3", "Did you mean '--set train.epochs=3'? Known to instep run: -"),
        ("--foo run job.toml", "there is no option --foo. Known to instep: --help, --version."),
        ("netlab up --rats 3", "Did you mean '--rate'? Known to instep netlab up: --help"),
        ("netlab upp", "there is no action 'upp'. Did you mean 'up'? Known: clean, cut,"),
        ("rum job.toml", "there is no command 'rum'. Did you mean 'run'?"),
        ("completion fish", "there is no shell 'fish'. Known: bash, zsh."),
    ],
)
def test_a_wrong_word_is_answered_with_those_of_its_own_command(capsys, words, said):
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_the_help_has_each_command_below_the_heading_of_its_group():
    text = make_parser(cli.GROUPS).format_help()
    places = [text.index(f"\n  {heading}:\n") for heading in cli.GROUPS]
    assert places == sorted(places)
    ends = [*places[1:], len(text)]
    for group, at, end in zip(cli.GROUPS.values(), places, ends, strict=True):
        assert all(f"\n    {name}" in text[at:end] for name in group)


def test_the_help_of_every_command_begins_with_an_example_that_the_command_takes(capsys):
    parser = make_parser(cli.GROUPS)
    every = [parser, *commands_of(parser).values()]
    every += [inner for each in every[1:] for inner in commands_of(each).values()]
    for each in every:
        first = each.format_help().splitlines()[0]
        assert first.startswith(f"Example: {each.prog.replace('[-h] ', '')}"), first
        parser.parse_args(first.split()[2:])
