"""Folds are trained in turn, continue where they were, and their figures are numpy's."""

import numpy as np
import pytest

from instep.client import folds
from instep.client.submit import Run
from instep.errors import DIVERGED, INTERRUPTED, RunError, SpecError, WorkerError
from instep.events import read_events
from instep.job import file as spec_file
from instep.report.figures.summary import summarise
from instep.store.run_folder import RunFolder
from made_up_runs import make_run, write_events

SCORES = [0.71, 0.88, 0.64, 0.79]


def job(name="net", folds=4, workers=2, **tables):
    data = {"split": "random", "folds": folds}
    table = {"name": name, "recipe": "digits.py:recipe", "workers": workers, "data": data}
    return spec_file.build({**table, **tables}, source="a test")


class Trainer:
    """Trains nothing, and leaves the folders of runs."""

    def __init__(self, monkeypatch):
        self.did = []
        self.next = {}
        """How the next training of a fold ends, if not well."""
        monkeypatch.setattr(folds, "run_job", self.run_job)
        monkeypatch.setattr(folds, "resume_run", self.resume_run)

    def run_job(self, job, runs, *, named, json_output):
        assert named
        path = make_run(runs / job.name, workers=job.workers)
        (path / "job.toml").write_text(spec_file.dump(job))
        return self.ended("run", path, job.data.fold)

    def resume_run(self, path, *, changes, json_output):
        return self.ended("resume", path, RunFolder(path).spec.data.fold)

    def ended(self, what, path, fold):
        self.did.append((what, fold))
        outcome, rule, code = self.next.pop(fold, ("completed", "epochs", 0))
        events = [*read_events(path / "events.jsonl")]
        for event in events:
            if event["event"] == "validated":
                event["metrics"] = {"loss": 1 - SCORES[fold], "accuracy": SCORES[fold]}
            if event["event"] == "run_finished":
                event |= {"outcome": outcome, "rule": rule}
        write_events(path, events)
        if outcome == "failed":
            raise WorkerError("worker 1 failed")
        return Run(path, summarise(RunFolder(path)), code)


def trained(tmp_path, the_job=None, **options):
    said = []
    return folds.run_folds(the_job or job(), tmp_path, said.append, **options), said


def test_every_fold_is_trained_and_the_figures_are_those_of_numpy(tmp_path, monkeypatch):
    trainer = Trainer(monkeypatch)
    done, said = trained(tmp_path)
    assert trainer.did == [("run", n) for n in range(4)]
    assert done.folder == tmp_path / "net-folds"
    assert [path.name for path in done.runs] == [f"net-fold-{n}" for n in range(4)]
    assert [RunFolder(path).spec.data.fold for path in done.runs] == [0, 1, 2, 3]
    table = done.as_table()
    assert [*table][-3:] == ["folds", "mean", "deviation"]
    assert [fold["accuracy"] for fold in table["folds"]] == SCORES
    for name, values in (("accuracy", SCORES), ("loss", [1 - score for score in SCORES])):
        assert table["mean"][name] == pytest.approx(np.mean(values), rel=1e-14)
        assert table["deviation"][name] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert not [line for line in said if "--resume" in line]
    assert "accuracy 0.7550 +- 0.1034   (0.7100, 0.8800, 0.6400, 0.7900)" in done.lines()[2]
    assert trained(tmp_path)[0].folder == tmp_path / "net-folds-2"
    with pytest.raises(RunError, match=r"net-folds exists\. Choose another --name"):
        trained(tmp_path, named=True)


@pytest.mark.parametrize(
    ("ending", "did"),
    [
        (("interrupted", "interrupted", INTERRUPTED), [("resume", 1), ("run", 2), ("run", 3)]),
        (("failed", None, 0), [("resume", 1), ("run", 2), ("run", 3)]),
        (("stopped", "stop_after_steps", 0), [("resume", 1)]),
        (("stopped", "patience", 0), []),
        (("stopped", "diverged", DIVERGED), []),
    ],
)
def test_folds_continue_where_they_were(tmp_path, monkeypatch, ending, did):
    trainer = Trainer(monkeypatch)
    trainer.next = {1: ending}
    if ending[0] == "failed":
        said = []
        with pytest.raises(WorkerError):
            folds.run_folds(job(), tmp_path, said.append)
    else:
        first, said = trained(tmp_path)
        assert first.exit_code == ending[2]
        assert (first.as_table()["mean"] is None) == bool(did)
    assert any("--resume continues in" in line for line in said) == bool(did)
    trainer.did.clear()
    done, _ = trained(tmp_path, job(workers=3), resume=True)
    assert trainer.did == did
    assert [fold["accuracy"] for fold in done.folds] == SCORES


def test_other_folds_than_before_are_refused(tmp_path, monkeypatch):
    trainer = Trainer(monkeypatch)
    with pytest.raises(RunError, match=r"there is no .*net-folds, so no folds to continue"):
        trained(tmp_path, resume=True)
    trained(tmp_path)
    trainer.did.clear()
    for other, sentence in [
        (job(folds=3), r"data\.folds was 4 and cannot become 3"),
        (job(seed=1), r"seed was 0 and cannot become 1"),
        (job(train={"epochs": 3}), r"train\.epochs was None in the folds before and is 3 now"),
        (job(stop={"patience": 3}), r"stop\.patience was 0 in the folds before and is 3 now"),
    ]:
        with pytest.raises(SpecError, match=sentence):
            trained(tmp_path, other, resume=True)
    assert not trainer.did


def test_nothing_is_left_of_folds_that_were_refused(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise SpecError("no")

    monkeypatch.setattr(folds, "run_job", refuse)
    said = []
    with pytest.raises(SpecError, match="no"):
        folds.run_folds(job(), tmp_path, said.append)
    assert not list(tmp_path.iterdir())
    assert not [line for line in said if "--resume" in line]


def test_what_has_no_folds_is_refused(tmp_path):
    script = job(recipe="train.py:__main__")
    for wrong in (job(data={"split": "random"}), script):
        with pytest.raises(SpecError, match="folds"):
            trained(tmp_path, wrong)
