"""Which trials a search has: of the job and results alone, whoever is done first or is killed."""

import random
from contextlib import nullcontext

import numpy as np
import pytest

from instep.errors import RunError, SpecError
from instep.events import LEDGER
from instep.job.file import build, dump
from instep.search.begin import run_search
from instep.search.clients import Clients, job_file
from instep.search.live import LiveTrials
from instep.search.plan import base_of, same_search, trial_job
from instep.search.record import SearchRecord, locked
from instep.search.results import Result, ToldTrial, best_of, check_metric
from instep.search.sampling import TrialSampler
from instep.search.search import Search
from instep.store.run_folder import RunFolder
from made_up_runs import make_run, write_events, write_ledger
from made_up_searches import make_search

SPACE = {
    "arguments.lr": {"low": 1e-5, "high": 0.1, "log": True},
    "arguments.width": {"whole": [16, 256], "log": True},
    "train.global_batch": [32, 64],
}


def job_of(**search):
    table = {"trials": 14, "width": 3, "space": SPACE, **search}
    train = {"determinism": "bits"}
    return build({"recipe": "a.py:b", "seed": 3, "train": train, "search": table}, source="a test")


def outcome(values, bounds):
    """What a trial comes to: a function of what it was given."""
    at_rungs = [values["arguments.width"] * (0.01 - values["arguments.lr"]) - 1 / r for r in (1, 4)]
    for rung, value in zip((1, 4), at_rungs, strict=True):
        bound = dict(bounds).get(rung)
        if bound is not None and not value <= bound:
            return Result("pruned", value, ((rung, value),))
    return Result("completed", at_rungs[-1] - 1, ((1, at_rungs[0]), (4, at_rungs[1])))


def searched(folder, job, seed=None):
    """All trials of a search; with a seed, done in a random order, and killed at any moment."""
    folder.mkdir()
    draw = random.Random(seed)
    record = SearchRecord(folder, write=True)
    search = Search(folder, job, record, 2, lambda *_: None)
    while len(search.results) < search.trials:
        if seed is not None and draw.random() < 0.3:
            record.__exit__(None, None, None)
            record = SearchRecord(folder, write=True)
            search = Search(folder, job, record, 2, lambda *_: None)
        search.choose()
        open_ones = [n for n in range(len(search.chosen)) if n not in search.results]
        number = open_ones[0] if seed is None else draw.choice(open_ones)
        search.over(number, outcome(*search.chosen[number]))
    record.__exit__(None, None, None)
    return search.chosen, search.results


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "gp", "cmaes"])
def test_the_same_trials_come_in_any_order_of_ends_and_after_any_kill(tmp_path, sampler):
    needed = {"qmc": ["scipy"], "gp": ["optuna", "scipy"], "cmaes": ["optuna", "cmaes"]}
    for package in needed.get(sampler, ["optuna"]):
        pytest.importorskip(package)
    job = job_of(sampler=sampler, prune="halving", rungs=[1, 4])
    expected = searched(tmp_path / "undisturbed", job)
    assert {each.result.state for each in expected[1].values()} == {"completed", "pruned"}
    for seed in range(4):
        assert searched(tmp_path / f"disturbed-{seed}", job, seed) == expected


def test_what_cma_es_has_learnt_comes_back_in_another_process():
    pytest.importorskip("optuna")
    pytest.importorskip("cmaes")
    space = {f"arguments.{key}": {"low": -5.0, "high": 5.0} for key in "xyz"}
    job = job_of(sampler="cmaes", trials=40, width=2, space=space)

    def chosen_by(rebuilt):
        chosen, told = [], []
        for number in range(40):
            if number % rebuilt == 0:
                sampler = TrialSampler(job.search, 3, upwards=False)
            known = max(0, number - 1)
            for values in chosen[len(told) : known]:
                value = sum((each - 1) ** 2 for each in values.values())
                told.append(ToldTrial(values, Result("completed", value)))
            chosen.append(sampler.values(number, told, chosen[known:]))
        return chosen

    kept = chosen_by(99)
    assert chosen_by(7) == kept
    sampler = TrialSampler(job.search, 3, upwards=False)
    told = [ToldTrial(values, Result("completed", 1.0)) for values in kept[:9]]
    with pytest.raises(RunError, match="chosen by another version"):
        sampler.values(9, told, [{**kept[9], "arguments.x": 0.0}])


def test_a_sampler_whose_package_is_missing_is_refused_in_a_sentence(monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for sampler, package in (("cmaes", "cmaes"), ("gp", "scipy"), ("qmc", "scipy")):
        with pytest.raises(SpecError, match=rf"needs {package}.*pip install 'instep\[search\]'"):
            TrialSampler(job_of(sampler=sampler).search, 0, upwards=False)


def test_the_table_of_a_search_that_runs_has_the_best_trials_and_those_that_train(tmp_path):
    record = SearchRecord(tmp_path, write=True)
    search = Search(tmp_path, job_of(sampler="qmc", trials=9), record, 2, lambda *_: None)
    search.choose()
    live = LiveTrials()
    assert live.lines(search, 5.0)[-1] == "told    0 of 9: none   workers 0 of 2"
    search.over(0, Result("completed", 0.5, steps=90, seconds=1.0))
    search.workers = {1: 2, 2: 1}
    folder = tmp_path / "trial-001"
    folder.mkdir()
    events = [
        {"event": "worker_ready", "time": 1.0, "last_step": 90},
        {"event": "validated", "time": 2.0, "metrics": {"loss": 0.25}},
    ]
    write_events(folder, events)
    steps = np.zeros(3, LEDGER)
    steps["step"] = [1, 2, 31]
    write_ledger(folder, steps)
    best, training, starting, last, _ = (line.split() for line in live.lines(search, 8.0)[1:])
    assert (best[:3], best[-3:]) == (["trial-000", "0.5000", "90"], ["completed,", "best", "-"])
    assert (training[:3], training[-2:]) == (["trial-001", "0.2500", "31/90"], ["training", "2"])
    assert (starting[:3], starting[-2:]) == (["trial-002", "-", "-"], ["starting", "1"])
    assert " ".join(last) == "told 1 of 9: 1 completed workers 3 of 2 ends in about 24 s"
    record.__exit__(None, None, None)


def test_a_grid_has_each_of_its_points_once(tmp_path):
    space = {"b": [1, 2], "c": {"low": 0, "high": 1, "step": 0.25}, "d": {"whole": [3, 4]}}
    job = job_of(sampler="grid", trials=100, space={"arguments": space}, width=50)
    record = SearchRecord(tmp_path, write=True)
    search = Search(tmp_path, job, record, 1, lambda *_: None)
    search.choose()
    points = {tuple(values.values()) for values, _ in search.chosen}
    record.__exit__(None, None, None)
    assert points == {(b, c / 4, d) for b in (1, 2) for c in range(5) for d in (3, 4)}
    assert len(search.chosen) == search.trials == 20


def test_a_trial_is_an_ordinary_job_with_its_values_and_bounds(tmp_path):
    base = job_of(prune="median", rungs=[2])
    job = trial_job(base, 7, {"arguments.lr": 1e-5, "train.global_batch": 32}, ((2, 0.1),))
    assert (job.name, job.train.global_batch, job.arguments) == ("trial-007", 32, {"lr": 1e-5})
    assert (job.stop.bounds, job.search.space) == (((2, 0.1),), {})
    with pytest.raises(SpecError, match="nonsense"):
        trial_job(base, 7, {"train.nonsense": 1}, ())


def test_a_search_knows_when_its_job_is_another(tmp_path):
    before = job_of()
    assert same_search(dump(before), job_of(trials=99, keep=1)) == ""
    assert "width" in same_search(dump(before), job_of(width=5))


def test_a_metric_that_no_validation_has_is_refused(tmp_path):
    run = RunFolder(make_run(tmp_path / "trial-000"))
    check_metric(run, "accuracy")
    with pytest.raises(SpecError, match=r"'acuracy': .* Did you mean 'accuracy'"):
        check_metric(run, "acuracy")


def test_a_search_has_one_process(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(RunError, match="running in another process"),
        locked(tmp_path),
    ):
        pass
    with pytest.raises(RunError, match="not the folder of a search"):
        SearchRecord(tmp_path, write=False)


def test_what_a_search_sets_gives_way_to_the_job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('recipe = "a.py:b"\n[search.space]\n"arguments.x" = [1, 2]\n')
    job = base_of(path, [])
    assert (job.train.determinism, job.train.threads, job.checkpoint.every) == ("bits", 1, "30s")
    job = base_of(path, ["train.determinism=order", "checkpoint.every=7"])
    assert (job.train.determinism, job.train.threads, job.checkpoint.every) == ("order", 1, 7)
    path.write_text('recipe = "a.py:b"\n[train]\nmerge = "always"\n[search]\nspace = {"a.x" = [1]}')
    assert base_of(path, []).train.determinism == "order"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", r"no \[search.space\]"),
        ('[search]\nprune = "median"\nspace = {"a.x" = [1]}', "without rungs"),
        ('[search]\nspace = {"workers" = [1]}', "decides nothing about the model"),
        ('[search]\nspace = {"a.x" = {low = 0.0, high = 1.0, log = true}}', "low above 0"),
        ('[search]\nspace = {"a.x" = {low = 2, high = 1}}', "low < high"),
        ('[search]\nspace = {"a.x" = [1, 1]}', "each value once"),
        ('[search]\nsampler = "grid"\nspace = {"a.x" = {low = 0, high = 1}}', "needs points"),
        ('[search]\nmetric = "f1"\nspace = {"a.x" = [1]}\n[stop]\ntarget = 1.0', "one metric"),
        ('[search]\nspace = {"a.x" = [1]}\n[stop]\ntime_limit = "5m"', "by the clock"),
    ],
)
def test_a_search_that_cannot_be_is_refused_before_it_begins(tmp_path, lines, says):
    path = tmp_path / "job.toml"
    path.write_text(f'recipe = "a.py:b"\n{lines}\n')
    with pytest.raises(SpecError, match=says):
        base_of(path, [])


def test_the_best_trial_is_the_first_of_equal_ones_and_none_that_was_pruned():
    values = [(0.2, "completed"), (0.9, "pruned"), (0.7, "completed"), (0.7, "completed")]
    told = {n: ToldTrial({}, Result(state, value)) for n, (value, state) in enumerate(values)}
    assert best_of(told, True, 2) == [2, 3]
    assert best_of(told, False) == [0]


def test_a_trial_is_trained_with_the_values_of_the_record_whatever_its_file_says(
    tmp_path, monkeypatch
):
    def start(clients, number, workers):
        raise KeyboardInterrupt

    monkeypatch.setattr(Clients, "start", start)
    monkeypatch.setattr(Clients, "warm", lambda clients: nullcontext())
    (tmp_path / "jobs").mkdir()
    with SearchRecord(tmp_path, write=True) as record:
        search = Search(tmp_path, job_of(sampler="random"), record, 2, lambda *_: None)
        for text in ("", "seed = 99\n"):  # of somebody's editor
            job_file(tmp_path, 0).write_text(text)
            with pytest.raises(KeyboardInterrupt):
                search.conduct()
            expected = dump(trial_job(search.job, 0, *search.chosen[0]))
            assert job_file(tmp_path, 0).read_text() == expected


def test_a_search_is_not_cut_to_fewer_trials_than_it_has_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    space = {"seed": [*range(8)]}
    folder = make_search(tmp_path / "net", sampler="grid", space=space, prune="none")
    nothing = {"name": None, "capacity": 1, "tell": lambda *_: None}
    with pytest.raises(SpecError, match="5 trials that are over, and 1 that have begun"):
        run_search(folder, ["search.trials=5"], tmp_path, **nothing)
