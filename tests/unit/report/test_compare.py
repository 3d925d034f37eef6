from instep.report.compare import differing_settings, figures
from instep.report.summary import summarise
from instep.store.run_folder import RunFolder
from made_up_runs import make_run


def test_only_settings_that_differ_are_listed():
    one = {"workers": 2, "train": {"epochs": 3, "seed": 7}, "sync": {"options": {}}}
    other = {"workers": 4, "train": {"steps": 9, "seed": 7}, "sync": {"options": {}}}
    assert differing_settings(one, other) == [
        ("workers", "2", "4"),
        ("train.epochs", "3", "not given"),
        ("train.steps", "not given", "9"),
    ]


def test_metrics_of_either_run_are_among_the_figures(tmp_path):
    one = summarise(RunFolder(make_run(tmp_path / "one")))
    other = summarise(RunFolder(make_run(tmp_path / "other", metrics=False)))
    rows = {name: values for name, *values in figures(one, other)}
    assert rows["validation loss"] == [0.5, None]
    assert rows["steps"] == [48, 48]
