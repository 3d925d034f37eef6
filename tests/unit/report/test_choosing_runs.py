"""`instep list --where` and `--best`: which runs are listed, and in which order."""

import json

import pytest

from instep.cli import main
from instep.errors import SpecError
from made_up_runs import make_run, write_events


def validated(path, *values):
    """Give the run these validations of accuracy, at steps 16, 32, ..."""
    lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    kept = [event for event in lines if event["event"] != "validated"]
    measured = [
        {
            "event": "validated",
            "time": kept[-1]["time"],
            "step": 16 * (at + 1),
            "metrics": {"loss": 1 - value, "accuracy": value},
        }
        for at, value in enumerate(values)
    ]
    write_events(path, [*kept[:-1], *measured, kept[-1]])


@pytest.fixture
def runs(tmp_path):
    for name, values in {"early": (0.9, 0.7), "late": (0.5, 0.8), "none": ()}.items():
        make_run(tmp_path / name, workers=3 if name == "late" else 2, name=name)
        (tmp_path / name / "run.id").write_text(name)
        validated(tmp_path / name, *values)
    return tmp_path


def names(capsys, runs, *words):
    assert main(["list", str(runs), *words, "--json"]) == 0
    return [each["name"] for each in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("conditions", "chosen"),
    [
        (["accuracy>0.7"], ["late"]),  # of the last validation
        (["accuracy>=0.7"], ["early", "late"]),
        (["loss < 0.25"], ["late"]),
        (["workers=3"], ["late"]),
        (["workers = 3.0"], ["late"]),
        (["workers!=3"], ["early", "none"]),
        (["state=completed", "workers<=2"], ["early", "none"]),
        (["train.determinism=order"], ["early", "late", "none"]),
        (["name='late'"], ["late"]),
        (["accuracy>0.7", "workers<3"], []),
        (["state>1"], []),
    ],
)
def test_a_run_is_listed_where_all_conditions_hold(runs, capsys, conditions, chosen):
    words = [word for each in conditions for word in ("--where", each)]
    assert sorted(names(capsys, runs, *words)) == chosen


def test_the_best_of_a_metric_comes_first_and_runs_without_it_are_left_out(runs, capsys):
    assert names(capsys, runs, "--best", "accuracy") == ["early", "late"]
    assert names(capsys, runs, "--best", "accuracy:min") == ["late", "early"]
    assert names(capsys, runs, "--best", "loss") == ["early", "late"]
    assert names(capsys, runs, "--best", "accuracy", "--where", "workers=3") == ["late"]
    assert main(["list", str(runs), "--best", "accuracy"]) == 0
    head, first, second, after = capsys.readouterr().out.splitlines()
    assert head.endswith("best accuracy")
    assert first.endswith("0.9 at step 16")
    assert second.endswith("0.8 at step 32")
    assert after == f"next    instep status {runs / 'early'}"


def test_where_no_run_is_chosen_a_sentence_says_so(runs, capsys):
    assert main(["list", str(runs), "--where", "accuracy>2"]) == 0
    assert capsys.readouterr().out == f"no run in {runs} is chosen by these conditions\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--where", "accuracy"], "--where 'accuracy': needs KEY, one of > >= < <= = !="),
        (["--where", "accuracy>high"], "> needs a number, and 'high' is none."),
        (["--where", "acuracy>0.5"], "no run has 'acuracy'. Did you mean 'accuracy'?"),
        (["--best", "acuracy"], "no run has measured 'acuracy'. Did you mean 'accuracy'?"),
        (["--best", "accuracy:most"], "needs a metric, such as accuracy, or error:min."),
        (["--best", ""], "needs a metric"),
    ],
)
def test_a_choice_that_no_run_knows_is_answered_with_what_there_is(runs, capsys, words, said):
    assert main(["list", str(runs), *words]) == SpecError.exit_code
    assert said in capsys.readouterr().err
