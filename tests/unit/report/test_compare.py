import re

from instep.report.figures.identity import differing_settings
from instep.report.figures.summary import summarise
from instep.report.page.comparison import comparison
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


def test_settings_of_any_number_of_jobs_are_compared():
    jobs = [{"seed": 1, "workers": 2}, {"seed": 1, "workers": 2}, {"seed": 1, "workers": 3}]
    assert differing_settings(*jobs) == [("workers", "2", "2", "3")]


def test_metrics_of_either_run_are_among_the_figures(tmp_path):
    one = RunFolder(make_run(tmp_path / "one"))
    other = RunFolder(make_run(tmp_path / "other", metrics=False))
    shown = comparison([one, other], [summarise(one), summarise(other)], ["one", "other"])
    assert re.search(r"validation loss</th>\D*>0\.5</td><td[^>]*>-</td>", shown)
    assert re.search(r"steps</th><td[^>]*>48</td><td[^>]*>48</td>", shown)
