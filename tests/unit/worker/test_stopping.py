"""How a verdict reaches every worker: a real master in a thread, workers as threads beside it."""

import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.comm.protocol.endpoint import Endpoint, Switchboard
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import ON_REQUEST, Figures, Stop, Verdict, Welcome
from instep.control.master import Master
from instep.engine.member import Member
from instep.errors import SpecError
from instep.events import STEPS as STEPS_OF
from instep.job import file as spec_file
from instep.job.train import StopSpec
from instep.recipe.recipe import Recipe
from instep.worker.loop.after_commit import AfterCommit
from instep.worker.loop.profiling import StepProfiler
from instep.worker.loop.stopping import Stopping, check_rules
from instep.worker.passes.activity import Activity
from instep.worker.training.training import Training

CPU = torch.device("cpu")
STEPS = 12
TIMEOUT_S = 600.0


def job(workers=1, **rules):
    table = {"recipe": "a.py:recipe", "workers": workers, "stop": rules}
    return spec_file.build(table, source="a test")


def impatient(member):
    """A worker that would wait for ever fails the test instead."""
    member._connection._channel._socket.settimeout(TIMEOUT_S)
    return member


class Run:
    """A run whose workers are threads, and whose steps compute nothing but a script."""

    def __init__(self, folder, workers, **rules):
        self.job, self.folder = job(workers, **rules), folder
        self.folder.mkdir()
        switchboard = Switchboard()
        self.endpoint, self.outcome = switchboard.endpoint, None
        self._master = Master(
            self.job, folder, switchboard, views=[], hosted=False, started=time.time(), about={}
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.ends = run_ranks(workers, self._work)
        self._thread.join()
        switchboard.close()

    def _serve(self):
        self.outcome = self._master.serve().finish

    def _work(self, comm):
        """As `Training.steps` does; gives the step at which this worker stopped."""
        member = impatient(Member(self.endpoint, comm.rank))
        member.wait_for_group()
        stopping, step, last = Stopping(member, comm, CPU), 0, False
        while not last:
            step += 1
            told = torch.tensor([float(stopping.asked_to_stop(step))])
            comm.all_reduce(told).wait()
            last = bool(told) or step == STEPS
            stopping.after_commit(step, 8.0 - step, 100.0 / step, last=last)
            if step % 5 == 0 and not last:
                last = stopping.after_validation(step, {"loss": 0.0, "accuracy": step / 10})
        member.done(step, ON_REQUEST if step < STEPS else "steps")
        member.close()
        return step

    def asked(self):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        keys = ("by", "rule", "step", "why")
        return [{k: e[k] for k in keys} for e in events if e["event"] == "stop_requested"]


@pytest.mark.parametrize("workers", [1, 3])
def test_figures_of_a_step_stop_all_workers_at_the_step_after_it(tmp_path, workers):
    run = Run(tmp_path / "run", workers, gradient_norm=15.0)
    why = "the norm of the gradient was 14.2857, below 15"
    assert run.asked() == [{"by": "master", "rule": "gradient_norm", "step": 7, "why": why}]
    assert run.ends == [8] * workers
    assert (run.outcome.outcome, run.outcome.rule, run.outcome.step) == (
        "stopped",
        "gradient_norm",
        8,
    )
    assert run.outcome.exit_code == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_figures_of_a_validation_stop_all_workers_at_its_own_step(tmp_path, workers):
    run = Run(tmp_path / "run", workers, metric="accuracy", target=0.75)
    why = "accuracy 1 reached the target 0.75"
    assert run.asked() == [{"by": "master", "rule": "target", "step": 10, "why": why}]
    assert run.ends == [10] * workers
    assert (run.outcome.outcome, run.outcome.rule) == ("stopped", "target")


def test_a_step_that_is_validated_waits_for_both_verdicts_and_the_first_is_the_rule(tmp_path):
    run = Run(tmp_path / "run", 2, gradient_norm=20.5, metric="accuracy", target=0.5)
    assert [asked["rule"] for asked in run.asked()] == ["gradient_norm"]
    assert run.ends == [5, 5]
    assert run.outcome.rule == "gradient_norm"


def test_figures_of_the_last_step_are_not_judged(tmp_path):
    run = Run(tmp_path / "run", 2, gradient_norm=100 / 11.5)
    assert run.asked() == []
    assert run.ends == [12, 12]
    assert (run.outcome.outcome, run.outcome.rule) == ("completed", "steps")


class Silent:
    """A master that takes one worker in and says nothing of its own accord."""

    def __init__(self, **rules):
        self.hub = Hub(largest=1 << 20)
        taking_in = threading.Thread(target=self._welcome, args=(job(**rules),))
        taking_in.start()
        self.member = impatient(Member(Endpoint(self.hub.address, "token"), 0))
        taking_in.join()
        self.stopping = Stopping(self.member, AloneComm(), CPU)

    def _welcome(self, job):
        self.peer = None
        while self.peer is None:
            for peer, _ in self.hub.receive(5.0):
                self.peer = peer
                text = spec_file.dump(job)
                self.hub.send(peer, Welcome(job=text, run="/nowhere", started=0.0))

    def heard(self):
        """What the worker has said since."""
        said = []
        while more := [message for _, message in self.hub.receive(0.05)]:
            said += more
        return said

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.member.close()
        self.hub.close()


def test_without_rules_nothing_is_sent_and_nothing_waits():
    with Silent() as master:
        master.stopping.after_commit(1, 0.5, None, last=False)
        assert not master.stopping.after_validation(1, {"loss": 0.5})
        assert not master.stopping.asked_to_stop(2)
        assert master.heard() == []


def test_rules_on_validations_cost_a_step_nothing():
    with Silent(patience=3) as master:
        master.stopping.after_commit(1, 0.5, None, last=False)
        assert not master.stopping.asked_to_stop(2)
        assert master.heard() == []


def test_a_rule_that_remembers_steps_is_told_figures_after_the_records_of_their_steps():
    with Silent(rise=2) as master:
        times = (0.0,) * 7
        master.member.records.add(b"", (1, 0, 8, 0.5, 1.0, *times, math.nan))
        master.stopping.after_commit(1, 0.5, None, last=False)
        records, figures = master.heard()
        (record,) = np.frombuffer(records.steps, STEPS_OF)
        assert (record["step"], figures.step) == (1, 1)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_stop_and_a_verdict_that_arrive_together_are_both_heard(swapped):
    with Silent(rise=2) as master:
        master.stopping.after_commit(1, 0.5, None, last=False)
        assert master.heard() == [Figures(step=1, loss=0.5, number=1)]
        words = [Verdict(step=1, rule="", number=1), Stop(rule="interrupted")]
        for word in reversed(words) if swapped else words:
            master.hub.send(master.peer, word)
        deadline = time.monotonic() + TIMEOUT_S
        while not master.member.stops.rule(2):
            assert time.monotonic() < deadline, "the Stop was lost"
        assert master.stopping.asked_to_stop(2)
        assert not master.stopping.verdict()


def test_a_stop_after_a_step_waits_for_that_step_to_count_wherever_training_stands():
    with Silent() as master:
        master.hub.send(master.peer, Stop(rule="gradient_norm", after=7))
        deadline = time.monotonic() + TIMEOUT_S
        while not master.member.stops.rule(8):
            assert time.monotonic() < deadline, "the Stop was lost"
        assert [master.stopping.asked_to_stop(step) for step in (6, 7, 8)] == [False, False, True]


@pytest.mark.parametrize(
    ("rules", "loss", "norm", "diverged"),
    [
        ({"non_finite": True}, math.nan, 1.0, True),
        ({"non_finite": True}, 1.0, math.inf, True),
        ({"non_finite": True}, 1.0, 1.0, False),
        ({"non_finite": True}, 1.0, None, False),
        ({}, math.nan, None, True),  # on by default
        ({"non_finite": False}, math.nan, None, False),
    ],
)
def test_parameters_are_past_saving_after_a_figure_that_is_not_finite(rules, loss, norm, diverged):
    with Silent(**rules) as master:
        master.stopping.after_commit(1, loss, norm, last=True)
        assert master.stopping.diverged == diverged
        assert master.heard() == []


@pytest.mark.parametrize(("rule", "diverged"), [("diverged", True), ("gradient_norm", False)])
def test_a_verdict_of_divergence_means_that_the_last_checkpoint_is_the_better_one(rule, diverged):
    with Silent(rise=2) as master:
        master.stopping.after_commit(1, 0.5, None, last=False)
        master.hub.send(master.peer, Verdict(step=1, rule=rule, number=1))
        assert master.stopping.asked_to_stop(2)
        assert master.stopping.diverged == diverged


def test_a_verdict_counts_after_its_step_also_where_that_is_computed_again():
    with Silent(rise=2) as master:
        master.stopping.after_commit(7, 0.5, None, last=False)
        master.hub.send(master.peer, Verdict(step=7, rule="diverged", number=1))
        assert [master.stopping.asked_to_stop(step) for step in (6, 7, 8)] == [False, False, True]


def went_back(master, step):
    """The worker has found corruption, and leaves its group for its clean copy."""
    training, state = Training.__new__(Training), SimpleNamespace(held=True)
    state.progress = SimpleNamespace(step=9)

    def go_back():
        state.progress = SimpleNamespace(step=step)
        return True

    observers = {"corruption": SimpleNamespace(go_back=go_back)}
    training.engine = SimpleNamespace(state=state, observers=observers, leave=lambda: None)
    training.member, training.activity = master.member, Activity()
    training._profiler = StepProfiler(master.member, training.activity)
    training.after = AfterCommit.__new__(AfterCommit)
    training.after._stopping = master.stopping
    master.member.broken = lambda error, *, holds: None
    training._leave()
    assert training.step == step


@pytest.mark.parametrize(("back_to", "stands"), [(6, False), (7, True)])
@pytest.mark.parametrize("heard", [True, False])
def test_a_verdict_on_a_step_that_was_undone_does_not_count(back_to, stands, heard):
    """Whether it had come before, or comes later."""
    with Silent(rise=2) as master:
        master.stopping.after_commit(7, 0.5, None, last=False)
        master.hub.send(master.peer, Verdict(step=7, rule="diverged", number=1))
        if heard:
            assert master.stopping.asked_to_stop(8)
        went_back(master, back_to)
        assert master.stopping.asked_to_stop(8) == master.stopping.diverged == stands
        master.stopping.after_commit(8, 0.5, None, last=False)
        master.hub.send(master.peer, Verdict(step=8, rule="diverged", number=2))
        assert master.stopping.asked_to_stop(9)
        assert master.stopping.diverged


@pytest.mark.parametrize(("back_to", "diverged"), [(4, False), (5, True)])
def test_a_loss_that_was_undone_does_not_keep_the_run_from_being_saved(back_to, diverged):
    with Silent(non_finite=True) as master:
        master.stopping.after_commit(5, math.nan, None, last=True)
        went_back(master, back_to)
        assert master.stopping.diverged == diverged


@pytest.mark.parametrize(
    ("after", "back_to", "stands"), [(7, 5, False), (7, 7, False), (7, 8, True), (None, 5, True)]
)
def test_a_stop_by_figures_that_were_undone_is_forgotten_until_it_is_said_again(
    after, back_to, stands
):
    with Silent() as master:
        master.hub.send(master.peer, Stop(rule="diverged", after=after))
        deadline = time.monotonic() + TIMEOUT_S
        while not master.member.stops.rule(9):
            assert time.monotonic() < deadline, "the Stop was lost"
        went_back(master, back_to)
        assert master.stopping.asked_to_stop(9) == stands
        master.hub.send(master.peer, Stop(rule="diverged", after=8))
        while not master.member.stops.rule(9):
            assert time.monotonic() < deadline, "the Stop was lost"


def recipe(**parts):
    return Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        train=[1, 2],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **parts,
    )


@pytest.mark.parametrize(
    ("rules", "parts", "words"),
    [
        ({"patience": 2}, {}, ["stop.patience = 2 watches", "no validation set", "validate=..."]),
        ({"target": 0.5}, {}, ["stop.target = 0.5 watches validations"]),
        (
            {"target": 0.5, "metric": "acuracy"},
            {"validate": [3], "metrics": {"accuracy": abs}},
            ["stop.metric = 'acuracy'", "Did you mean 'accuracy'? Known: accuracy, loss."],
        ),
    ],
)
def test_a_rule_that_no_validation_can_answer_is_refused(rules, parts, words):
    with pytest.raises(SpecError) as caught:
        check_rules(StopSpec(**rules), recipe(**parts))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    check_rules(StopSpec(metric="acuracy"), recipe())


def test_an_own_validation_without_the_metric_is_refused():
    refused = pytest.raises(SpecError, match=r"stop\.metric = 'accuracy'.*Known: loss\.")
    with Silent(target=0.9, metric="accuracy") as master, refused:
        master.stopping.after_validation(3, {"loss": 0.1})
