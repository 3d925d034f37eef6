"""`instep audit`: what is exact is said to be, and every damage to a ledger is found and named."""

import json
import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep.cli import main
from instep.data.batches import Batches
from instep.data.order import position
from instep.errors import RunError
from instep.events import LEDGER, ledger_header, read_events, read_records
from instep.report.figures.proof import prove, untiled
from instep.report.figures.summary import summarise
from instep.state.files.manifest import CheckpointManifest, encode
from instep.store.audit import Stretch, audit
from instep.store.run_folder import RunFolder
from made_up_runs import make_ledger, make_run, write_events, write_ledger

unhurried = settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def ledger_of(path):
    return read_records(path / "ledger.bin", LEDGER).copy()


# ---- steps


@unhurried
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30), st.data())
def test_shares_cut_anywhere_and_dealt_in_any_order_tile_their_steps(samples, batch, steps, data):
    parts = []
    for record in make_ledger(1, samples, batch, steps):
        inside = st.integers(int(record["first"]), int(record["stop"]))
        cuts = sorted(data.draw(st.lists(inside, max_size=3)))
        for first, stop in pairwise([record["first"], *cuts, record["stop"]]):
            part = record.copy()
            part["first"], part["stop"] = first, stop
            parts.append(part)
    ledger = np.array(data.draw(st.permutations(parts)))
    assert untiled(ledger, Batches(samples, batch), steps).tolist() == []

    at = data.draw(st.integers(0, len(ledger) - 1))
    if ledger[at]["stop"] > ledger[at]["first"]:
        step = int(ledger[at]["step"])
        assert untiled(np.delete(ledger, at), Batches(samples, batch), steps).tolist() == [step]
        doubled = np.append(ledger, ledger[at : at + 1])
        assert untiled(doubled, Batches(samples, batch), steps).tolist() == [step]


def test_two_steps_that_took_each_others_samples_are_found_though_each_sample_stands_once():
    ledger = make_ledger(2, 100, 10, 10)
    third, fifth = ledger["step"] == 3, ledger["step"] == 5
    ledger["step"][third], ledger["step"][fifth] = 5, 3
    assert audit(ledger, Batches(100, 10)).exact
    assert untiled(ledger, Batches(100, 10), 10).tolist() == [3, 5]


def test_a_step_of_another_epoch_or_number_is_found():
    ledger = make_ledger(1, 100, 10, 30)
    ledger["epoch"][3] = 2
    ledger["step"][7] = 0
    assert untiled(ledger, Batches(100, 10), 30).tolist() == [0, 4, 8]
    assert untiled(ledger[:0], Batches(100, 10), 2).tolist() == [1, 2]
    assert untiled(ledger[:0], Batches(100, 10), 0).tolist() == []


def test_the_places_of_faults_are_named_in_order():
    ledger = make_ledger(1, 100, 10, 10)
    ledger = np.delete(np.append(ledger, ledger[6:7]), 2)
    ledger["stop"][-2] = 103
    (epoch,) = audit(ledger, Batches(100, 10), last_step=10).epochs
    assert epoch.faults == (
        Stretch("missing", 20, 30),
        Stretch("repeated", 60, 70),
        Stretch("stray", 100, 103),
    )
    assert not epoch.exact


def test_of_many_faults_in_an_epoch_the_first_five_are_named():
    ledger = make_ledger(1, 100, 2, 50)
    ledger["stop"] -= 1
    ledger["first"][40:] -= 2
    (epoch,) = audit(ledger, Batches(100, 2), last_step=50).epochs
    assert [fault.first for fault in epoch.faults] == [1, 3, 5, 7, 9]


@unhurried
@given(
    st.lists(st.tuples(st.integers(-5, 30), st.integers(-5, 30)).map(sorted), max_size=12),
    st.integers(1, 25),
)
def test_a_fault_is_named_where_counting_by_hand_finds_one(ranges, samples):
    ledger = np.zeros(len(ranges), LEDGER)
    uses = dict.fromkeys(range(-5, 31), 0)
    for record, (first, stop) in zip(ledger, ranges, strict=True):
        record["step"], record["first"], record["stop"] = 1, first, stop
        for place in range(first, stop):
            uses[place] += 1
    (epoch,) = audit(ledger, Batches(samples, samples), last_step=1).epochs
    wrong = {
        "missing": {p for p in range(samples) if not uses[p]},
        "repeated": {p for p in range(samples) if uses[p] > 1},
        "stray": {p for p in uses if uses[p] and not 0 <= p < samples},
    }
    for fault in epoch.faults:
        assert set(range(fault.first, fault.stop)) <= wrong[fault.what]
    assert bool(epoch.faults) == any(wrong.values())
    if epoch.faults:
        assert epoch.faults[0].first == min(set().union(*wrong.values()))


# ---- runs


def test_a_run_to_its_end_is_exact_and_says_so_in_a_few_lines(tmp_path, capsys):
    path = make_run(tmp_path / "digits")
    assert main(["audit", str(path)]) == 0
    digest = audit(ledger_of(path), Batches(1000, 64)).sha256
    assert capsys.readouterr().out.splitlines() == [
        "covers  completed, 48 steps committed, 96 records in the ledger",
        "epoch   1 to 3: 1,000 samples each, each exactly once",
        "steps   each took exactly the samples that the job gives it",
        "total   3,000 samples used, 0 repeated, 0 missing, 0 not due",
        f"sha256  {digest} of every (epoch, position)",
        f"next    instep report {path}",
    ]


def test_json_says_the_same_as_an_object(tmp_path, capsys):
    path = make_run(tmp_path / "digits", steps=20, outcome="stopped")
    assert main(["audit", str(path), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    wanted = {"exact": True, "outcome": "stopped", "last_step": 20, "used": 1256, "records": 40}
    assert {key: said[key] for key in wanted} == wanted
    assert (said["repeated"], said["missing"], said["stray"]) == (0, 0, 0)
    assert [epoch["expected"] for epoch in said["epochs"]] == [1000, 256]
    assert (said["untiled_steps"], said["epochs"][0]["faults"]) == ([], [])
    assert said["sha256"] == audit(ledger_of(path), Batches(1000, 64)).sha256


def test_a_run_that_goes_on_is_proved_as_far_as_it_got(tmp_path, capsys):
    path = make_run(tmp_path / "digits", steps=21, outcome=None)
    ledger = ledger_of(path)
    write_ledger(path, ledger[:-1])  # worker 1 has not told of step 21 yet
    assert main(["audit", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "covers  unfinished, 20 steps committed, 41 records in the ledger, "
        "1 of them after the last committed step"
    )
    assert lines[2] == "epoch   2: 256 of 1,000 samples so far, each exactly once"


def test_a_torn_tail_is_left_out_and_told(tmp_path, capsys):
    path = make_run(tmp_path / "digits", steps=21, outcome=None)
    whole = (path / "ledger.bin").read_bytes()
    (path / "ledger.bin").write_bytes(whole[:-7])
    assert main(["audit", str(path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "20 steps committed, 41 records in the ledger, 1 of them after" in first
    assert first.endswith("the last 39 bytes are not a whole record")


def test_a_torn_tail_of_a_run_that_came_to_its_end_is_a_fault(tmp_path, capsys):
    path = make_run(tmp_path / "digits")
    (path / "ledger.bin").write_bytes((path / "ledger.bin").read_bytes()[:-7])
    assert main(["audit", str(path)]) == 6
    assert "fault   epoch 3: 1,000 due, 980 used: 20 missing" in capsys.readouterr().out


@pytest.mark.parametrize("ledger", ["empty", "absent"])
def test_a_run_without_a_step_is_exact_and_claims_nothing(tmp_path, capsys, ledger):
    path = make_run(tmp_path / "digits", steps=0, outcome="interrupted")
    if ledger == "absent":
        (path / "ledger.bin").unlink()
    assert main(["audit", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "covers  interrupted, 0 steps committed, 0 records in the ledger",
        f"next    instep report {path}",
    ]


def test_an_empty_ledger_of_a_run_that_took_steps_is_a_fault(tmp_path, capsys):
    path = make_run(tmp_path / "digits")
    (path / "ledger.bin").write_bytes(b"")
    assert main(["audit", str(path)]) == 6
    out, err = capsys.readouterr()
    assert "fault   step 1 to 48:" in out
    assert "3,000 samples missing" in err


def dropped(ledger):
    return np.delete(ledger, 40)


def doubled(ledger):
    return np.append(ledger, ledger[40:41])


def shifted(ledger):
    ledger["first"][40] -= 3
    ledger["stop"][40] -= 3
    return ledger


@pytest.mark.parametrize(
    ("damage", "fault", "sentence"),
    [
        (
            dropped,
            "epoch 2: 1,000 due, 968 used: 32 missing; first at positions 256 to 287 (missing)",
            "32 samples missing, 1 step with positions that are not its own.",
        ),
        (
            doubled,
            "epoch 2: 1,000 due, 1,032 used: 32 repeated; first at positions 256 to 287 (repeated)",
            "32 samples repeated, 1 step with positions that are not its own.",
        ),
        (
            shifted,
            "epoch 2: 1,000 due, 1,000 used: 3 repeated, 3 missing; first at positions 253 to 255 "
            "(repeated), positions 285 to 287 (missing)",
            "3 samples missing, 3 samples repeated, 1 step with positions that are not its own.",
        ),
    ],
)
def test_a_damaged_ledger_ends_with_6_and_names_epoch_place_and_step(
    tmp_path, capsys, damage, fault, sentence
):
    path = make_run(tmp_path / "digits")
    write_ledger(path, damage(ledger_of(path)))
    assert main(["audit", str(path)]) == 6
    out, err = capsys.readouterr()
    assert f"fault   {fault}" in out.splitlines()
    assert "fault   step 21: not exactly the positions that the job gives it" in out.splitlines()
    assert "epoch   1, 3: 1,000 samples each, each exactly once" in out.splitlines()
    assert err.startswith(f"instep: the ledger of {path} is not exact up to step 48: {sentence}")
    assert err.count("\n") == 1

    assert main(["audit", str(path), "--json"]) == 6
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["exact"], said["untiled_steps"]) == (False, [21])


@pytest.mark.parametrize("damage", [dropped, doubled, shifted, lambda ledger: ledger])
def test_the_figures_of_the_summary_are_those_of_the_proof(tmp_path, damage):
    path = make_run(tmp_path / "digits")
    write_ledger(path, damage(ledger_of(path)))
    folder = RunFolder(path)
    summary, proof = summarise(folder), prove(folder)
    assert summary["repeated_samples"] == proof.audit.repeated + proof.audit.stray
    assert summary["missing_samples"] == proof.audit.missing
    assert summary["samples"] == proof.audit.used
    exact = not (summary["repeated_samples"] or summary["missing_samples"])
    assert exact == proof.exact == (damage not in (dropped, doubled, shifted))


@unhurried
@given(st.integers(0, 96 * LEDGER.itemsize - 1), st.integers(1, 255), st.booleans())
def test_no_byte_that_says_who_took_what_when_can_change_unseen(tmp_path, at, change, ended):
    path = tmp_path / "digits"
    if not path.exists():
        make_run(path)
        (path / "whole.jsonl").write_bytes((path / "events.jsonl").read_bytes())
    events = read_events(path / "whole.jsonl")
    write_events(path, [e for e in events if ended or e["event"] != "run_finished"])
    data = bytearray(make_ledger(2, 1000, 64, 48).tobytes())
    data[at] ^= change
    (path / "ledger.bin").write_bytes(ledger_header() + data)
    place = at % LEDGER.itemsize
    who = any(
        LEDGER.fields[name][1] <= place < LEDGER.fields[name][1] + LEDGER[name].itemsize
        for name in ("course", "generation", "worker", "kind", "unit")
    )
    proof = prove(RunFolder(path))
    assert proof.exact == who or (not ended and proof.run.last_step < 48)  # the last one, in flight
    json.dumps(proof.as_table(), allow_nan=False)
    assert proof.lines()


def test_a_record_after_the_end_of_a_run_is_a_fault(tmp_path, capsys):
    path = make_run(tmp_path / "digits")
    write_ledger(path, make_ledger(2, 1000, 64, 49)[:97])
    assert main(["audit", str(path)]) == 6
    assert "1 record after the last step" in capsys.readouterr().err


def test_without_the_size_of_the_data_nothing_is_claimed(tmp_path, capsys):
    path = make_run(tmp_path / "digits")
    (path / "events.jsonl").write_text("")
    assert main(["audit", str(path)]) == 6
    out, err = capsys.readouterr()
    assert "exactly once" not in out
    assert re.search("nothing can be proved about .*digits: the size of its training set", err)


def test_many_faults_are_counted_and_not_listed_whole(tmp_path, capsys):
    path = make_run(tmp_path / "digits", samples=64, epochs=400)
    ledger = ledger_of(path)
    ledger["stop"][::2] -= 1
    write_ledger(path, ledger)
    assert main(["audit", str(path)]) == 6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 30
    assert "fault   380 more epochs with faults" in lines
    assert "fault   step 1 to 400: not exactly the positions that the job gives" in (
        "\n".join(lines)
    )


def test_what_a_step_should_have_taken_is_asked_of_the_order_itself():
    """The proof and the training read the same function, so they cannot drift apart."""
    ledger = make_ledger(1, 100, 7, 40)
    for record in ledger:
        where = position(int(record["step"]), 100, 7)
        assert (record["epoch"], record["first"], record["stop"]) == where


# ---- the checksum in a checkpoint


def checkpoint_of(run, **facts):
    folder = run / "checkpoints" / "step-00000007"
    folder.mkdir(parents=True)
    made = CheckpointManifest(step=7, instep="0", torch="2", files={}, facts=facts)
    (folder / "manifest.json").write_bytes(encode(made))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_ledger_is_compared_with_its_checksum_in_the_newest_checkpoint(tmp_path, capsys, damaged):
    run = make_run(tmp_path / "net")
    ledger = ledger_of(run)
    before = ledger_header() + ledger[:14].tobytes()
    checkpoint_of(run, ledger_bytes=len(before), ledger_crc32=zlib.crc32(before))
    if damaged:
        ledger["worker"][3] ^= 1
        write_ledger(run, ledger)
    proof = prove(RunFolder(run))
    assert (proof.audit.exact, proof.untiled) == (True, ())
    assert proof.exact is not damaged
    assert main(["audit", str(run)]) == (RunError.exit_code if damaged else 0)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    wrong = "records before step 7 do not match the checksum in the checkpoint of that step"
    assert (said.count(wrong), (run / "report.html").read_text().count(wrong)) == (
        (2, 2) if damaged else (0, 0)
    )


@pytest.mark.parametrize("facts", [{}, {"ledger_bytes": "x", "ledger_crc32": 1}])
def test_a_checkpoint_without_a_checksum_proves_nothing(tmp_path, facts):
    run = make_run(tmp_path / "net")
    checkpoint_of(run, **facts)
    assert prove(RunFolder(run)).exact
