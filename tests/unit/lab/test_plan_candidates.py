"""The ways that a plan looks at, what it makes of crews' answers, and what it says."""

import json
import re
import signal
import tempfile

import msgspec
import pytest

from instep.errors import SpecError, raise_first
from instep.job import file as spec_file
from instep.lab.plan.answers import SAVING_BYTES, CrewRequest, far_apart, merged, summed
from instep.lab.plan.candidates import candidates, job_of
from instep.lab.plan.crews import crews_for, twice
from instep.lab.plan.machine_file import read_machines
from instep.lab.plan.plan import JobPlan, Question, _planned
from instep.lab.plan.probe import probe
from instep.plan.lines import plan_lines
from instep.plan.machine import HostLink, Machines
from instep.plan.measured import CrewFigures, ProbedMachine
from instep.plan.ways import TrainingWay
from instep.privacy.refusals import repeated

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
    found |= {
        "sent_bytes": sent,
        "passes_of_a_step": 1,
        "peak_bytes": 200 << 20,
        "resident_bytes": 190 << 20,
    }
    return {**found, "buckets": [[1.0, 1.0]], **more}


def first(step_s):
    told = msgspec.json.encode([True, "", "yes"]).decode()
    more = {"trial": told, "passes": [[16, 0.01], [64, 0.04]], "update_s": 0.001}
    more |= {"state_bytes": 8, "steps_of_run": 50, "trained_bytes": 4000, "parameters": 1000}
    return {"crew": 0, "ranks": [rank(0, step_s, **more)], "others_busy": 0.0, "seconds": 1.0}


def planned(job, question, answers):
    machines = question.machines(job)
    ways, refused = candidates(job, machines, question.most_workers(machines, job))
    requests = crews_for(ways, job, machines)
    found = {n: answers(each.way) for n, each in enumerate(requests[:3])}
    found = {n: each for n, each in found.items() if each}
    found[0] = first(0.1)
    probed = summed(requests, found, ProbedMachine(2, 3.0))
    return _planned(job, question, machines, ways, refused, probed)


def test_ways_with_the_same_result_keep_batch_and_strategy_and_others_say_what_they_change(job):
    ways, refused = candidates(job(), Machines(1, 2), 8, meshes=True)
    same = [each.way for each in ways if each.way.same]
    plain = [way for way in same if way.key == TrainingWay(way.workers).key]
    assert [way.workers for way in plain] == [1, 2, 4]
    meshes = {way.axes for way in same if way.mesh}
    assert meshes == {"shard = 2", "tensor = 2", "stages = 2"}
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


def test_a_way_that_the_recipe_does_not_go_with_is_refused_and_not_priced(job):
    """A stream and stale servers, say, which have no crew of their own that could fail."""
    ways, _ = candidates(job(), Machines(1, 2), 2)
    names = [each.way.name for each in ways]
    stale = next(name for name in names if "bounded_stale" in name)
    why = "a stream (IterableDataset) does not go with sync.name = 'bounded_stale'"
    alone = first(0.1)
    alone["ranks"][0]["refused"] = [why if name == stale else "" for name in names]
    requests = crews_for(ways, job(), Machines(1, 2))
    answer = {"crew": 1, "ranks": [rank(n, 0.06) for n in range(2)], "others_busy": 0.0}
    for told, priced in ((alone, False), (first(0.1), True)):
        probed = summed(requests, {0: told, 1: answer}, ProbedMachine(2, 3.0))
        found = _planned(job(), Question(most=2), Machines(1, 2), ways, [], probed)
        assert (stale in {each.way.name for each in found.ranking.other}) is priced
        assert ((stale, why) in {(each.name, each.why) for each in found.refused}) is not priced


def test_a_mesh_is_priced_where_one_process_cannot_hold_the_model(job):
    own = job("mesh.shard=2", "workers=2")
    ways, _ = candidates(own, Machines(1, 2), 2)
    requests = crews_for(ways, own, Machines(1, 2))
    (mesh,) = [n for n, each in enumerate(requests) if each.way.mesh]
    failed = {"failed": "not enough memory", "others_busy": 0.0, "seconds": 1.0}
    told = first(0.05)["ranks"][0]
    for name in ("passes", "trained_bytes", "state_bytes", "parameters", "update_s"):
        del told[name]
    answer = {"ranks": [told, rank(1, 0.05)], "others_busy": 0.0, "seconds": 1.0}
    answers = {**dict.fromkeys(range(mesh), failed), mesh: answer}
    probed = summed(requests, answers, ProbedMachine(2, 3.0))
    assert not probed.failed
    found = _planned(own, Question(most=2), Machines(1, 2), ways, [], probed)
    table = found.as_table()
    assert table["best"] == "2 all_reduce, shard = 2"
    assert table["ways"][0]["step_s"] == pytest.approx(0.05, rel=0.01)
    assert {each.name for each in found.refused} >= {"1 worker", "2 all_reduce"}
    assert all("not enough memory" in each.why for each in found.refused)
    lines = "\n".join(plan_lines(table))
    assert "whether it pays is not known" in lines
    assert "0 parameters" not in lines
    probed = summed(requests, dict.fromkeys(range(mesh + 1), failed), ProbedMachine(2, 3.0))
    assert probed.failed == "not enough memory"


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


def test_a_plan_of_what_comes_once_says_that_it_has_used_some(job):
    plans = [planned(job(*more), Question(), lambda way: None) for more in ([], ["data.once=true"])]
    assert [any("are not trained on" in note for note in each.notes) for each in plans] == [0, 1]


@pytest.mark.parametrize("command", ["instep replay", "instep chaos"])
def test_a_job_that_reads_what_comes_once_is_not_run_again_to_compare(job, command):
    raise_first(repeated(job(), command))
    with pytest.raises(SpecError, match=rf"{command} runs a job more than once .* data\.once"):
        raise_first(repeated(job("data.once=true"), command))


def test_what_fits_nowhere_is_refused_with_the_missing_bytes(job):
    question = Question(most=1, memory_bytes=100 << 20)
    missing = (90 << 20) + SAVING_BYTES + 4000 + 8
    with pytest.raises(SpecError, match=f"lacks {missing:,}"):
        planned(job(), question, lambda way: None)


def test_a_worker_takes_the_most_of_its_peak_the_trials_and_what_it_holds_while_it_saves(job):
    own = job()
    requests = crews_for(candidates(own, Machines(1, 2), 2)[0], own, Machines(1, 2))
    (served,) = [each for each in requests if each.way.servers]

    def of(peak, held, tried):
        alone = first(0.1)
        alone["ranks"][0] |= {"tried_bytes": tried << 20}
        ranks = [rank(n, 0.06) for n in range(served.way.processes)]
        for each in ranks:
            each |= {"peak_bytes": peak << 20, "resident_bytes": held << 20}
        answer = {"crew": 1, "ranks": ranks, "others_busy": 0.0, "seconds": 1.0}
        found = summed([requests[0], served], {0: alone, 1: answer}, ProbedMachine(2)).crews[1]
        return found.worker_bytes, found.server_bytes

    before, saving = 200 << 20, SAVING_BYTES + 4000 + 8  # the first crew's own peak
    assert of(150, 100, 180) == (before, before)
    assert of(150, 100, 260) == (260 << 20, before)
    assert of(300, 100, 260) == (300 << 20, 300 << 20)
    assert of(300, 290, 260) == ((290 << 20) + saving, (290 << 20) + saving)


def test_machines_of_an_earlier_plan_are_read_again(job, tmp_path):
    asked = Question(hosts=4, rate="1gbit", emulated=True)
    found = planned(job(), asked, lambda way: None).as_table()
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(found))
    assert read_machines(file) == asked.machines(job())
    assert read_machines(file).link == HostLink(1e9)


GOOD = {"hosts": 2, "host_cores": 2}


@pytest.mark.parametrize(
    "told",
    [
        "",
        "{}",
        "[1]",
        '{"machine": 3}',
        json.dumps({**GOOD, "hosts": 0}),
        json.dumps({**GOOD, "bits_per_s": -1}),
        json.dumps({**GOOD, "bits_per_s": "1gbit"}),
        json.dumps({**GOOD, "latency_s": -1.0}),
        json.dumps({**GOOD, "speeds": [1.0]}),
        json.dumps({**GOOD, "speeds": [1.0, 0.0]}),
        "[" * 5000,
        b"\xff\xfe",
        None,
    ],
)
def test_a_file_without_machines_is_refused_in_one_sentence(told, tmp_path):
    file = tmp_path / "plan.json"
    if told is not None:
        file.write_bytes(told.encode() if isinstance(told, str) else told)
    with pytest.raises(SpecError, match=r"--machine .*instep plan --json") as caught:
        read_machines(file)
    assert "\n" not in str(caught.value)
    file.write_text(json.dumps(GOOD))
    assert read_machines(file) == Machines(2, 2)


def test_a_visit_that_others_disturbed_does_not_count_and_two_quiet_ones_are_averaged(job):
    own = job()
    requests = crews_for(candidates(own, Machines(1, 2), 2)[0], own, Machines(1, 2))
    pair = next(n for n, each in enumerate(requests) if each.way.name == "2 all_reduce")
    visits = [requests[0], *[requests[pair]] * 3]

    def of(*visited):
        found = {0: first(0.1)}
        for number, (step_s, busy) in enumerate(visited, 1):
            ranks = [rank(n, step_s, sent=4000.0) for n in range(2)]
            found[number] = {"crew": number, "ranks": ranks, "others_busy": busy, "seconds": 1.0}
        return summed(visits, found, ProbedMachine(2, 3.0)).crews[1]

    both = of((0.06, 0.0), (0.08, 0.1))
    assert both.whole_s == pytest.approx(0.07)
    assert both.visits == pytest.approx([0.06, 0.08])
    quiet = of((0.06, 0.0), (0.13, 1.4), (0.08, 0.1))
    assert quiet.whole_s == pytest.approx(both.whole_s)
    assert quiet.visits == both.visits


def test_of_three_visits_the_odd_one_does_not_count_and_two_that_differ_call_for_more():
    def visit(whole_s):
        return CrewFigures(2, codec="int8", whole_s=whole_s, visits=[whole_s])

    other = CrewFigures(4, whole_s=1.0, visits=[1.0])
    assert not far_apart([visit(0.10), other, visit(0.11), other])
    assert far_apart([visit(0.06), other, visit(0.09)]) == {visit(0.06).key}
    for odd in (0.02, 0.2):
        crew, alone = merged([visit(0.06), other, visit(odd), visit(0.08)])
        assert crew.whole_s == pytest.approx(0.07)
        assert crew.visits == [0.06, 0.08]
        assert alone == other


def test_every_crew_without_a_mesh_takes_steps_twice_those_with_another_result_last(job):
    own, machines = job(), Machines(1, 2)
    requests = crews_for(candidates(own, machines, 2, meshes=True)[0], own, machines)
    again = twice(requests)[len(requests) :]
    assert {each.way.key for each in again} == {e.way.key for e in requests if not e.way.mesh}
    coded = [each.way.codec != "none" for each in again]
    assert any(coded)
    assert coded == sorted(coded)


def test_crews_of_emulated_hosts_are_on_their_links_unless_there_can_be_none(job):
    machines = Machines(4, 2, HostLink(1e8), emulated=True)
    ways, _ = candidates(job(), machines, 4)
    for linked in (True, False):
        found = crews_for(ways, job(), machines, linked=linked)
        assert {each.rate for each in found[1:]} == {"100000000bit" if linked else None}
        assert found[0].rate is None
        assert {each.hosts for each in found} == {1, 2, 4}


def test_crews_run_here_and_leave_no_checkpoint_and_no_host(job):
    own = job()
    ways, _ = candidates(own, Machines(4, 2, HostLink(1e9)), 4, meshes=True)
    for each in crews_for(ways, own, Machines(4, 2, HostLink(1e9))):
        assert isinstance(each, CrewRequest)
        assert each.way.workers <= (4 if each.way.mesh else 2)
        assert each.job.checkpoint.every == "never"
    assert TrainingWay(1).name == "1 worker"


def test_a_plan_that_is_ended_by_a_signal_leaves_no_folder(job, tmp_path, monkeypatch):
    def in_time(*_):
        raise AssertionError("the signal ends the process, and the folder stays")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, way = job(), TrainingWay(1)
    before = signal.signal(signal.SIGTERM, in_time)
    try:
        with pytest.raises(KeyboardInterrupt):
            probe(made, [CrewRequest(way, made)], 1, 5.0, lambda _: signal.raise_signal(15))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.glob("*instep-plan-*"))
