"""The ways that a plan looks at, what it makes of crews' answers, and what it says."""

import re

import msgspec
import pytest

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.lab.plan.candidates import candidates, job_of
from instep.lab.plan.plan import JobPlan, Question, _planned, _requests, read_machines
from instep.lab.plan.probe import SAVING_BYTES, CrewRequest, _summed
from instep.plan.lines import plan_lines
from instep.plan.machine import HostLink, Machines
from instep.plan.measured import ProbedMachine
from instep.plan.ways import TrainingWay

PARTS = 4


@pytest.fixture
def job(tmp_path):
    (tmp_path / "net.py").write_text("def recipe(): ...\n")
    file = tmp_path / "job.toml"
    file.write_text(
        f'name = "net"\nrecipe = "net.py:recipe"\n[train]\nsteps = 50\nglobal_batch = 64\n'
        f"micro_batches = {PARTS}\n"
    )
    return lambda *overrides: spec_file.load(file, overrides)


def rank(number, step_s, sent=0.0, **more):
    """One process's answer: twelve steps, half of them passes."""
    times = [[0.5 * step_s, 0.2 * step_s, 0.3 * step_s, 0.1 * step_s, step_s]] * 12
    found = {"rank": number, "times": times, "kernels": [0.001] * 12, "small_s": 1e-4}
    found |= {"sent_bytes": sent, "passes_of_a_step": 1, "peak_bytes": 200 << 20}
    return {**found, "buckets": [[1.0, 1.0]], **more}


def first(step_s):
    told = msgspec.json.encode([True, "", "yes"]).decode()
    more = {"trial": told, "passes": [[16, 0.01], [64, 0.04]], "update_s": 0.001}
    more |= {"state_bytes": 8, "steps_of_run": 50, "trained_bytes": 4000, "parameters": 1000}
    return {"crew": 0, "ranks": [rank(0, step_s, **more)], "others_busy": 0.0, "seconds": 1.0}


def planned(job, question, answers):
    machines = question.machines(job)
    ways, refused = candidates(job, machines, question.most_workers(machines, job))
    requests = _requests(ways, job, machines)
    found = {n: answers(each.way) for n, each in enumerate(requests[:3])}
    found = {n: each for n, each in found.items() if each}
    found[0] = first(0.1)
    probed = _summed(requests, found, ProbedMachine(2, 3.0))
    return _planned(job, question, machines, ways, refused, probed)


def test_ways_with_the_same_result_keep_batch_and_strategy_and_others_say_what_they_change(job):
    ways, refused = candidates(job(), Machines(1, 2), 8)
    same = [each.way for each in ways if each.way.same]
    assert [way.workers for way in same if way.strategy == "all_reduce"] == [1, 2, 4]
    assert {way.strategy for way in same} == {"all_reduce", "server_sync"}
    assert all(str(PARTS) in each.why for each in refused)
    assert {each.name for each in refused} >= {"8 all_reduce"}
    for each in ways:
        text = [f"workers={each.way.workers}", *each.way.changes]
        assert job_of(each.way, job()).sync == each.job.sync == job(*text).sync


def test_of_a_job_with_rounds_the_same_result_is_that_of_its_rounds(job):
    own = job("sync.name=diloco", "sync.participants=4")
    ways, _ = candidates(own, Machines(1, 2), 4)
    assert {each.way.strategy for each in ways if each.way.same} == {"diloco"}
    assert all(each.way.samples == 64 * 20 for each in ways if each.way.same)


def test_a_crew_that_fails_is_a_row_with_its_reason_and_the_others_are_ranked(job):
    def answers(way):
        if way.workers == 2:
            return {"crew": 1, "failed": "no second process here", "others_busy": 0, "seconds": 1}
        return None

    found = planned(job(), Question(most=2), answers)
    reasons = {each.name: each.why for each in found.refused}
    assert "no second process here" in reasons["2 all_reduce"]
    assert found.ranking.best is not None
    assert found.ranking.best.way.name == "1 worker"
    assert not found.ranking.pays


def test_every_figure_of_the_sentences_follows_from_the_table(job):
    def answers(way):
        ranks = [rank(n, 0.06, sent=4000.0) for n in range(way.processes)]
        return {"crew": 1, "ranks": ranks, "others_busy": 0.0, "seconds": 1.0}

    found: JobPlan = planned(job(), Question(most=2), answers)
    table = found.as_table()
    rows = {row["way"]: row for row in table["ways"]}
    assert table["best"] == "2 all_reduce"
    assert rows["2 all_reduce"]["step_s"] == pytest.approx(0.06, rel=0.01)
    for row in rows.values():
        assert sum(row["parts_s"].values()) == pytest.approx(row["commit_s"])
        assert row["low_s"] <= row["step_s"] <= row["high_s"]
    (best,) = [text for label, text in table["explained"] if label == "best"]
    times = rows["1 worker"]["step_s"] / rows["2 all_reduce"]["step_s"]
    assert best.startswith(f"2 all_reduce: {times:.2f} times as fast as one worker")
    why = [text for label, text in table["explained"] if label == "why not"]
    for text in why:
        name, _, rest = text.partition(": ")
        ratio = float(re.findall(r"([\d.]+) times as long", rest)[0])
        assert ratio == round(rows[name]["step_s"] / rows[table["best"]]["step_s"], 2)
    lines = "\n".join(plan_lines(table))
    assert all(row in lines for row in rows)
    assert "instep run JOB --workers 2" in lines


def test_what_fits_nowhere_is_refused_with_the_missing_bytes(job):
    question = Question(most=1, memory_bytes=100 << 20)
    missing = (100 << 20) + SAVING_BYTES + 4000 + 8
    with pytest.raises(SpecError, match=f"lacks {missing:,}"):
        planned(job(), question, lambda way: None)


def test_machines_of_an_earlier_plan_are_read_again(job, tmp_path):
    asked = Question(hosts=4, rate="1gbit", emulated=True)
    found = planned(job(), asked, lambda way: None).as_table()
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(found))
    assert read_machines(file) == asked.machines(job())
    assert read_machines(file).link == HostLink(1e9)
    file.write_text("{}")
    with pytest.raises(SpecError, match="instep plan --json"):
        read_machines(file)


def test_crews_run_here_and_leave_no_checkpoint_and_no_host(job):
    own = job()
    ways, _ = candidates(own, Machines(4, 2, HostLink(1e9)), 4)
    for each in _requests(ways, own, Machines(4, 2, HostLink(1e9))):
        assert isinstance(each, CrewRequest)
        assert each.way.workers <= 2
        assert each.job.checkpoint.every == "never"
    assert TrainingWay(1).name == "1 worker"
