"""Callbacks in whole runs: every call once, in order, whoever is killed whenever."""

import json
import random
import signal
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started, kill, kill_members, newest_pids

import instep
from instep.errors import InstepError
from instep.store.run_folder import RunFolder
from marks import tail

pytestmark = pytest.mark.process

STEPS = 120
TRAIN = {"steps": STEPS, "global_batch": 16, "determinism": "bits", "validate_every": 40}
RECIPE = f"{RECIPES / 'calls_back.py'}:recipe"


def written(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "written.jsonl").read_text().splitlines()]


def train(folder: Path, workers: int = 2, **more):
    given = {"name": "w", "seed": 5, "train": TRAIN, "checkpoint": {"every": 25}, "quiet": True}
    return instep.train(RECIPE, runs=folder, workers=workers, **(given | more))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("undisturbed"), workers=1).path


def plain(lines: list[dict]) -> list[dict]:
    """What is the same at any number of workers: when a checkpoint is complete, is not."""
    return [line for line in lines if line["moment"] != "on_save"]


def check_complete(lines: list[dict], wanted: list[dict], kills: int = 0) -> None:
    """Each call of the undisturbed run is there, in the same order, and once as a first one; but a
    kill can come after a call was begun and before it could write, and then only its repetition
    is there. All others that are repeated follow a first one."""
    seen = dict[tuple, dict]()
    for line in plain(lines):
        seen.setdefault(key(line), line)
    assert [line | {"again": False} for line in seen.values()] == plain(wanted)
    assert sum(line["again"] for line in seen.values()) <= kills
    assert all(seen[key(line)] is line for line in plain(lines) if not line["again"])
    saved = Counter(line["checkpoint"] for line in lines if line["moment"] == "on_save")
    assert all(line["there"] for line in lines if line["moment"] == "on_save")
    assert saved.keys() >= {f"step-{max(line['step'] for line in wanted):08d}"}


def key(line: dict) -> tuple:
    return line["who"], line["moment"], line["step"]


@pytest.mark.tail
def test_calls_are_the_same_at_any_number_of_workers_and_in_order(tmp_path, undisturbed):
    run = train(tmp_path, workers=3)
    lines, wanted = written(run.path), written(undisturbed)
    assert plain(lines) == plain(wanted)
    assert not any(line["again"] for line in lines)
    steps = [line["step"] for line in lines]
    assert all(a <= b for a, b in pairwise(steps))
    first = [(line["who"], line["moment"]) for line in plain(lines) if line["step"] == 40]
    moments = ["on_step_end", "on_evaluate", "on_log"]
    assert first == [(who, moment) for moment in moments for who in ("first", "second")]
    assert lines[-1]["samples"] == sum(min(16, 101 - 16 * (at % 7)) for at in range(STEPS))
    saved = [line["checkpoint"] for line in lines if line["moment"] == "on_save"]
    assert sorted(set(saved)) == [f"step-{s:08d}" for s in (25, 50, 75, 100, 120)]
    assert all(count == 2 for count in Counter(saved).values())


def test_what_is_logged_reaches_log_and_summary(undisturbed):
    run = RunFolder(undisturbed)
    logged = run.logged["twice_the_loss"]
    losses = {line["step"]: line["loss"] for line in written(undisturbed)}
    assert {step: value for step, (value, _) in logged.items()} == {
        step: 2 * loss for step, loss in losses.items()
    }
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["logged"] == {"twice_the_loss": 2 * losses[STEPS]}
    assert run.logged["train/learning_rate"] == {1: (0.1, pytest.approx(1.8e9, rel=1))}


def begin(start: Start, folder: Path, sleeps: float) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPE}"\nworkers = 3\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeterminism = "bits"\nvalidate_every = 40\n'
        f"[checkpoint]\nevery = 25\n[arguments]\npause_s = 0.004\nsleeps = {sleeps}\n"
    )
    return start("-m", "instep", "run", job)


@pytest.mark.slow
def test_the_worker_that_makes_the_calls_is_killed_in_one(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, sleeps=0.03)  # in which nearly all of the time goes
    made = program.work / "runs" / "disturbed" / "written.jsonl"
    for many in (40, 200):
        program.until(lambda many=many: made.exists() and len(written(made.parent)) > many, "calls")
        kill(newest_pids(program)[0])
    assert program.end() == 0, program.stderr
    lines = written(program.run)
    check_complete(lines, written(undisturbed))
    assert not program.events("went_back")
    again = [key(line) for line in plain(lines) if line["again"]]
    assert 1 <= len(again) <= 2
    assert {who for who, _, _ in again} == {"second"}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 40])
def test_kills_at_random_moments_repeat_only_calls_that_were_begun(
    start: Start, tmp_path: Path, undisturbed: Path, kills: int
) -> None:
    program = begin(start, tmp_path, sleeps=0.002 * kills)
    program.until(program.is_training, "training")
    kill_members(program, kills, random.Random(kills))
    assert program.end() == 0, program.stderr
    lines = written(program.run)
    check_complete(lines, written(undisturbed), kills)
    if not program.events("went_back"):
        assert sum(line["again"] for line in plain(lines)) <= 2 * kills


@pytest.mark.slow
def test_a_resumed_run_calls_again_for_the_steps_that_are_computed_again(tmp_path, undisturbed):
    run = train(tmp_path, train=TRAIN | {"stop_after_steps": 60})
    before = [each for each in written(run.path) if key(each)[1:] != ("on_evaluate", 60)]
    (run.path / "checkpoints" / "step-00000060").rename(tmp_path / "gone")
    instep.resume(run.path, quiet=True)
    lines = [each for each in written(run.path) if key(each)[1:] != ("on_evaluate", 60)]
    check_complete(lines, written(undisturbed))
    again = [line for line in plain(lines[len(before) :]) if line["again"]]
    assert [line["step"] for line in again if line["who"] == "first"][::2] == [*range(51, 61)]


@pytest.mark.slow
def test_a_run_that_is_resumed_at_its_last_step_calls_nothing_twice(tmp_path, undisturbed):
    run = train(tmp_path, train=TRAIN | {"stop_after_steps": 60})
    instep.resume(run.path, quiet=True)
    lines = written(run.path)
    assert not any(line["again"] for line in lines)
    evaluated_at_the_stop = [line for line in lines if line["step"] == 60]
    assert {line["moment"] for line in evaluated_at_the_stop} >= {"on_evaluate", "on_save"}
    steps = [line["step"] for line in lines if key(line)[:2] == ("first", "on_step_end")]
    assert steps == [*range(1, STEPS + 1)]


@pytest.mark.tail
def test_a_callback_that_raises_ends_the_run_and_its_line_is_named(tmp_path):
    with pytest.raises(InstepError) as caught:
        train(tmp_path, arguments={"fails_at": 7})
    said = str(caught.value)
    assert "at step 7, in Fails.on_step_end: RuntimeError: this callback cannot go on" in said
    assert "calls_back.py" in said
    assert "raise RuntimeError" in said
    assert RunFolder(tmp_path / "w").last_step == 7


SPLIT = RECIPE.replace(":recipe", ":split")
APART = {
    "shard": ["mesh.shard=2"],
    "zero 2": ["mesh.shard=2", "mesh.zero=2"],
    "tensor": ["mesh.tensor=2"],
    "stages": ["mesh.stages=2"],
    "diloco": [
        *('sync.name="diloco"', "sync.participants=4", "sync.options.local_steps=2"),
        'arguments.optimizer="adamw"',
    ],
    "servers": ['sync.name="server_sync"', "sync.servers=1"],
}
"""Of two processes, and a server."""


def run_split(start: Start, folder: Path, settings: list[str], **arguments: object) -> Started:
    given = [
        *("workers=2", "seed=5", "train.steps=60", "train.global_batch=32", "train.threads=1"),
        *("train.micro_batches=8", "train.validate_every=20", 'train.determinism="bits"'),
        *("checkpoint.every=10", 'report.loggers=["csv"]'),
        *settings,
        *(f"arguments.{name}={json.dumps(value)}" for name, value in arguments.items()),
    ]
    job = folder / "job.toml"
    job.write_text(f'name = "w"\nrecipe = "{SPLIT}"\n')
    words = [word for each in given for word in ("--set", each)]
    return start("-m", "instep", "run", job, *words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_each_way_to_train_calls_once_and_in_order_also_if_its_processes_are_killed(
    start: Start, tmp_path: Path, kind: str
) -> None:
    alone = run_split(start, tmp_path, APART[kind])
    assert alone.end() == 0, alone.stderr
    wanted = written(alone.run)
    assert [line["step"] for line in wanted if key(line)[:2] == ("first", "on_step_end")] == [
        *range(1, 61)
    ]
    program = run_split(start, tmp_path, APART[kind], pause_s=0.02)
    program.until(program.is_training, "training")
    assert kill_members(program, 3, random.Random(kind), pauses_s=(0.3, 1.0)).total() == 3
    assert program.end() == 0, program.stderr
    lines = written(program.run)
    check_complete(lines, wanted, kills=3)
    logged = RunFolder(program.run).logged["twice_the_loss"]
    assert {step: value for step, (value, _) in logged.items()} == {
        line["step"]: 2 * line["loss"] for line in wanted
    }
    points = (program.run / "metrics.csv").read_text()
    assert [f"\n{n}," in points for n in range(1, 61)] == [True] * 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shard", "tensor", "stages"])
def test_a_callback_that_calls_the_model_of_a_mesh_is_refused(start, tmp_path, kind):
    program = run_split(start, tmp_path, APART[kind], fails="calls")
    assert program.end() == 3
    assert "Asks.on_step_end has called the model, of which each process of a mesh" in (
        program.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stages", "diloco", "servers"])
def test_one_that_raises_ends_the_run_whichever_way_it_trains(start, tmp_path, kind):
    program = run_split(start, tmp_path, APART[kind], fails="raises")
    assert program.end() == 5
    assert "at step 7, in Asks.on_step_end: RuntimeError: this callback cannot" in program.stderr
    program.check_no_process_is_left()


@pytest.mark.slow
def test_one_that_does_not_return_for_long_is_named_once(start, tmp_path):
    program = run_split(start, tmp_path, [], fails="sleeps")
    assert program.end() == 0, program.stderr
    said = [event["text"] for event in program.events("warning")]
    (text,) = [each for each in said if "Asks.on_step_end has not returned for 10 s" in each]
    assert text.endswith("on worker 0 at step 7; the run waits for it.")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_of_loggers_that_is_killed_or_stopped_loses_no_point(start, tmp_path, number):
    program = run_split(start, tmp_path, [], pause_s=0.01)
    program.until(program.is_training, "training")
    (loggers,) = [
        each
        for each in psutil.Process(program.process.pid).children()
        if "instep.report.loggers.follow" in each.cmdline()
    ]
    loggers.send_signal(number)
    assert program.end() == 0, program.stderr
    lines = (program.run / "metrics.csv").read_text().splitlines()
    assert {int(line.split(",")[0]) for line in lines[1:] if "train/loss" in line} == {
        *range(1, 61)
    }
    assert "warning: a logger failed" not in program.stderr


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("writes", "'0.weight' of the model"),
        tail("freezes", "whether '0.weight' needs a gradient"),
    ],
)
def test_a_callback_that_changes_the_model_is_refused(tmp_path, how, named):
    with pytest.raises(InstepError, match=f"Spoils.on_step_end has changed {named}"):
        train(tmp_path, arguments={"spoils": how})


@pytest.mark.slow
def test_a_callback_that_leaves_the_model_in_eval_mode_changes_nothing(tmp_path, undisturbed):
    run = train(tmp_path, arguments={"spoils": "mode"})
    sums = [RunFolder(p).last("model_saved")["parameters_sha256"] for p in (run.path, undisturbed)]
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_loggers_of_a_run_get_all_that_it_has(tmp_path):
    run = train(tmp_path, report={"loggers": ["csv"], "gradient_norm": True})
    lines = (run.path / "metrics.csv").read_text().splitlines()
    names = Counter(line.split(",")[2] for line in lines[1:])
    assert names["train/loss"] == names["train/gradient_norm"] == names["twice_the_loss"] == STEPS
    assert names["validation/accuracy"] == 3
    assert names["train/learning_rate"] == 1


@pytest.mark.slow
def test_callbacks_are_called_in_a_loop_over_steps(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(RECIPES)!r})\n"
        "import calls_back, instep\n"
        "train = {'steps': 9, 'global_batch': 16}\n"
        "with instep.join(calls_back.recipe, name='w', train=train) as session:\n"
        "    for step in session.steps():\n"
        "        pass\n"
    )
    program: Started = start(script)
    assert program.end() == 0, program.stderr
    lines = written(program.work / "runs" / "w")
    assert [line["step"] for line in lines if key(line)[:2] == ("first", "on_step_end")] == [
        *range(1, 10)
    ]
