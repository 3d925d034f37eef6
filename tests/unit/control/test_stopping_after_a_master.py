"""A master is lost as a rule fires: the next one comes to the same verdicts."""

import json
import math
import subprocess
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.decisions import endings
from instep.control.decisions.events import Restarted
from instep.control.decisions.phases import Member, Phase
from instep.control.decisions.state import State
from instep.control.journal import Begin, Journal
from instep.control.master import Master
from instep.events import STEPS, EventLog
from instep.job import file as spec_file
from instep.store.folder import BEGINNING

MEMBER = Member(wanted=True, phase=Phase.INSIDE, formed=1)
TRAINING = State(
    members={0: MEMBER, 1: MEMBER}, phase="training", generation=1, group=(0, 1), course=1
)


class Next:
    """The master after one that was lost, and worker 0, which calls it again.

    Args:
        rules: of `[stop]`.
        steps: loss and norm of each step that is in the records.
        validated: loss of a validation, by step.
        stop: what the journal has of a rule that fired.
        train: of the job.
        more: what the journal has else.
        told: events after all others.
        lagging: steps of worker 0 that were not recorded when the master was lost.
    """

    def __init__(
        self, folder, rules, steps, validated=None, stop="", train=None, told=(), lagging=0, **more
    ):
        self.folder = folder
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # lives until it is told
        table = {"recipe": "a.py:f", "workers": 2, "stop": rules, "train": train or {}}
        job = spec_file.build(table, source="a test")
        (folder / "job.toml").write_text(spec_file.dump(job))
        self._write(steps, validated or {}, told, lagging)
        self._board, there = Switchboard(), threading.Event()

        def serve():
            journal = Journal(folder, Begin(1.0, BEGINNING))
            journal.write(Restarted(), replace(TRAINING, stop=stop, **more))
            about = {"hosted": False, "started": 1.0, "about": {}, "journal": journal}
            self.master = Master(job, folder, self._board, views=[], **about)
            there.set()
            self.master.serve()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert there.wait(600)

    def _write(self, steps, validated, told, lagging):
        rows = [
            (number, worker, 8, loss, time.time(), *(0.0,) * 7, norm)
            for number, (loss, norm) in enumerate(steps, 1)
            for worker in (0, 1)
            if worker or number <= len(steps) - lagging
        ]
        (self.folder / "steps.bin").write_bytes(np.array(rows, STEPS).tobytes())
        log = EventLog(self.folder / "events.jsonl")
        log.emit("run_started", job={}, command="")
        for worker in (0, 1):
            log.emit("worker_joined", worker=worker, pid=self._process.pid, seconds=0.0)
        for step, loss in validated.items():
            log.emit("validated", step=step, metrics={"loss": loss}, scheduled=True)
        for name, fields in told:
            log.emit(name, **fields)
        log.close()

    def call(self, *again):
        """Worker 0 calls, says these again, and hears the verdicts."""
        endpoint = self._board.endpoint
        channel = self.channel = Channel.connect(endpoint.address)
        hello = m.Hello(
            token=endpoint.token,
            role="worker",
            number=0,
            pid=self._process.pid,
            generation=1,
            resends=len(again),
        )
        for message in (hello, *again):
            channel.send(message)
        channel.wait_for(m.Welcome)
        return [channel.wait_for(m.Verdict).rule for _ in again]

    def asked(self):
        """Rule and step of each stop that was asked for."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [(e["rule"], e["step"]) for e in events if e["event"] == "stop_requested"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if hasattr(self, "channel"):
            self.channel.close()
        with patch.object(endings, "EXIT_S", 0.05):  # nobody else is there to take leave
            self.master.interrupt("test")
            self.master.interrupt("test")
            self._thread.join()
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._board.close()


def figures(step, number, loss=1.0, norm=None):
    return m.Figures(step=step, loss=loss, gradient_norm=norm, number=number)


def of_validation(step, number, loss):
    return m.Figures(step=step, metrics={"loss": loss}, number=number)


NORMS = [(1.0, norm) for norm in (3.0, 2.0, 1.0, 0.25)]


@pytest.mark.parametrize("stop", ["", "gradient_norm"])
def test_a_rule_that_fired_when_the_master_was_lost_gives_the_same_verdict_for_the_same_step(
    tmp_path, stop
):
    """Whether the last master had heard of it, or only of the step's records."""
    with Next(tmp_path, {"gradient_norm": 0.5}, NORMS, stop=stop) as run:
        assert run.call(figures(3, 3, norm=1.0), figures(4, 4, norm=0.25)) == ["", "gradient_norm"]
        assert run.asked() == ([] if stop else [("gradient_norm", 4)])


def test_a_rule_that_fires_on_the_records_alone_gives_every_connecting_worker_its_verdict(tmp_path):
    """The worker that told the figures may have been lost with the master."""
    with Next(tmp_path, {"gradient_norm": 0.5}, NORMS) as run:
        run.call()
        assert run.channel.wait_for(m.Stop).rule == "gradient_norm"
        assert run.asked() == [("gradient_norm", 4)]


def test_a_validation_that_ended_the_run_as_the_master_was_lost_ends_it_still(tmp_path):
    steps = [(1.0, math.nan)] * 6
    with Next(tmp_path, {"target": 0.5}, steps, {3: 0.8, 6: 0.4}) as run:
        assert run.call(of_validation(6, 2, 0.4)) == ["target"]
        assert run.asked() == [("target", 6)]


def test_figures_that_are_sent_again_are_evaluated_once(tmp_path):
    steps, validated = [(1.0, math.nan)] * 3, {1: 1.0, 2: 2.0, 3: 2.0}
    with Next(tmp_path, {"patience": 3}, steps, validated) as run:
        again = [of_validation(step, step, loss) for step, loss in validated.items()]
        assert run.call(*again) == ["", "", ""]
        run.channel.send(of_validation(4, 4, 0.5))
        assert run.channel.wait_for(m.Verdict).rule == ""
        assert run.asked() == []


READY = ("worker_ready", {"worker": 0, "samples": 64, "last_step": 4})


@pytest.mark.parametrize(
    ("train", "told"), [({}, [READY]), ({"stop_after_steps": 4}, []), ({"steps": 9}, [])]
)
def test_the_last_step_is_not_judged_by_the_next_master_either(tmp_path, train, told):
    is_last = bool(told) or "stop_after_steps" in train
    with Next(tmp_path, {"gradient_norm": 0.5}, NORMS, train=train, told=told) as run:
        run.call()
        assert run.asked() == ([] if is_last else [("gradient_norm", 4)])
        assert bool(run.master._state.stop) != is_last


def test_figures_of_a_worker_that_was_lost_before_the_master_are_evaluated(tmp_path):
    """Its successor tells those of the last step again, and no others."""
    members = {0: MEMBER, 1: Member(wanted=True)}
    steps = [(1.0, math.nan)] * 4
    validated = {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    with Next(tmp_path, {"patience": 4}, steps, validated, lagging=2, members=members) as run:
        assert run.call(of_validation(4, 1, 2.0)) == [""]
        run.channel.send(of_validation(5, 2, 2.0))
        assert run.channel.wait_for(m.Verdict).rule == "plateau"


def found(clean_step):
    wrong = {"workers": [1], "suspects": [], "what": "state", "where": "w", "how": "it differs"}
    return {"step": 5, **wrong, "clean_step": clean_step}


FORMED = ("generation_started", {"generation": 1, "members": [0, 1], "reason": "", "seconds": 0})


def new_generation(run):
    """A worker is lost, and another takes its place."""
    state = run.master._state
    run.master._state = replace(state, generation=state.generation + 1)


@pytest.mark.parametrize("known", [True, False])
def test_figures_of_steps_that_were_undone_are_evaluated_again(tmp_path, known):
    """Whether the master that was lost had written what was found, or this one hears of it."""
    steps, validated = [(1.0, math.nan)] * 4, {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    told = [FORMED, *([("corruption_found", found(2))] if known else [])]
    with Next(tmp_path, {"patience": 4}, steps, validated, told=told) as run:
        run.call()
        if not known:
            run.channel.send(m.Emit(name="corruption_found", fields=found(2)))
        run.channel.send(of_validation(5, 5, 2.0))  # as it was before it went back
        assert run.channel.wait_for(m.Verdict).rule == ""
        new_generation(run)
        rules = []
        for step in (3, 4, 5):
            run.channel.send(of_validation(step, 3 + step, 2.0))
            rules.append(run.channel.wait_for(m.Verdict).rule)
        assert rules == ["", "", "plateau"]
        assert run.asked() == [("plateau", 5)]


@pytest.mark.parametrize(("clean_step", "stands"), [(3, False), (4, True)])
def test_a_stop_by_figures_that_were_undone_is_withdrawn(tmp_path, clean_step, stands):
    told = [FORMED, ("corruption_found", found(clean_step))]
    more = {"stop": "gradient_norm", "stop_after": 4, "told": told}
    with Next(tmp_path, {"gradient_norm": 0.5}, NORMS, **more) as run:
        run.call()
        assert bool(run.master._state.stop) == stands
