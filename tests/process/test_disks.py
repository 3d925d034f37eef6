"""A disk that is full, slow, damaged or gone: the run goes on or says so, and loses no commit."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from started import RECIPES, Start, Started

import instep
from disks import Disk, Ext4
from instep.events import read_events
from instep.report.figures.summary import summarise
from instep.state.files.manifest import published
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

STEPS = 80
ARGUMENTS = {"bad": [], "bad_validation": [], "sample_s": 0.002}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    done = instep.train(
        f"{RECIPES / 'unreadable.py'}:recipe",
        runs=tmp_path_factory.mktemp("undisturbed"),
        workers=1,
        seed=5,
        quiet=True,
        arguments={**ARGUMENTS, "sample_s": 0.0},
        train={"steps": STEPS, "global_batch": 16, "determinism": "bits", "validate_every": 40},
    )
    return RunFolder(done.path)


class OnDisk:
    """A run of two workers whose folder is on a disk of its own."""

    def __init__(self, start: Start, folder: Path, disk: Disk | None = None) -> None:
        job = folder / "job.toml"
        job.write_text(
            f'name = "run"\nrecipe = "{RECIPES}/unreadable.py:recipe"\nworkers = 2\nseed = 5\n'
            f'[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeterminism = "bits"\n'
            "validate_every = 40\n[data]\nloaders = 0\n[checkpoint]\nevery = 10\n"
            "[arguments]\n" + "".join(f"{name} = {value}\n" for name, value in ARGUMENTS.items())
        )
        runs = (disk.path if disk else folder) / "runs"
        self.path = runs / "run"
        self.program: Started = start("-m", "instep", "run", job, "--runs", runs)

    def saved(self) -> list[int]:
        """Steps of the checkpoints that were told of."""
        if not (self.path / "events.jsonl").is_file():
            return []
        return [e["step"] for e in self.told("checkpoint_saved")]

    def told(self, name: str) -> Iterator[dict[str, object]]:
        return (e for e in read_events(self.path / "events.jsonl") if e["event"] == name)

    def until_saved(self, times: int) -> None:
        self.program.until(lambda: len(self.saved()) >= times, "saved")

    def fails_with(self, *parts: str) -> None:
        """It ends with one sentence, and leaves no process."""
        assert self.program.end() == 6, self.program.stderr
        for part in parts:
            assert part in self.program.error.splitlines()[0]
        assert f"to resume: instep resume {self.path}" in self.program.error
        assert "Traceback" not in self.program.stderr
        assert self.program.stderr.count("instep: ") == 1
        self.program.check_no_process_is_left()

    def goes_on(self, start: Start, undisturbed: RunFolder) -> None:
        """Resumed, it comes to the end that it would have had."""
        program = start("-m", "instep", "resume", self.path)
        assert program.end() == 0, program.stderr
        self.is_as(undisturbed)

    def is_as(self, undisturbed: RunFolder) -> None:
        mine, wanted = summarise(RunFolder(self.path)), summarise(undisturbed)
        for key in ("outcome", "steps", "parameters_sha256", "metrics", "loss"):
            assert mine[key] == wanted[key], key
        assert mine["missing_samples"] == mine["repeated_samples"] == 0
        assert RunFolder(self.path).audit.sha256 == undisturbed.audit.sha256


@pytest.mark.tail
def test_a_full_disk_ends_the_run_with_a_sentence_and_with_room_it_resumes(
    start: Start, tmp_path: Path, small_disk: Disk, undisturbed: RunFolder
) -> None:
    run = OnDisk(start, tmp_path, small_disk)
    run.until_saved(2)

    def ended() -> bool:
        small_disk.fill()  # what is deleted meanwhile makes no room
        return run.program.process.poll() is not None

    deadline = time.monotonic() + 600
    while not ended():
        assert time.monotonic() < deadline, "it trains on without a ledger"
        time.sleep(0.02)
    # the worker's ledger or the master's journal, whichever was to be written first
    run.fails_with("Make room, or get access", f"{run.path}/")
    committed = RunFolder(run.path)
    assert committed.last_step >= 20
    assert committed.audit.exact
    small_disk.make_room()
    run.goes_on(start, undisturbed)


@pytest.mark.slow
def test_a_disk_that_fails_during_a_run_ends_it_with_a_sentence(
    start: Start, tmp_path: Path, frail_disk: Ext4, undisturbed: RunFolder
) -> None:
    run = OnDisk(start, tmp_path, frail_disk)
    run.until_saved(2)
    frail_disk.give_up()
    # the worker's ledger or the master's journal, whichever was to be written first
    run.fails_with("Make room, or get access", f"{run.path}/")
    frail_disk.repair()
    run.goes_on(start, undisturbed)


@pytest.mark.slow  # tests/unit/worker/test_saving.py has the same without processes
def test_where_only_checkpoints_find_no_room_training_goes_on_and_its_end_is_saved(
    start: Start, tmp_path: Path, small_disk: Disk, undisturbed: RunFolder
) -> None:
    run = OnDisk(start, tmp_path, small_disk)
    run.until_saved(2)
    small_disk.fill(leave=500_000)
    assert run.program.end() == 0, run.program.stderr
    (warning,) = run.told("warning")
    assert "was not saved" in str(warning["text"])
    assert (run.path / "report.html").is_file()
    assert "trace.json was not written" in run.program.stderr
    run.is_as(undisturbed)


@pytest.mark.slow
def test_a_slow_disk_costs_time_and_nothing_else(
    start: Start, tmp_path: Path, frail_disk: Ext4, undisturbed: RunFolder
) -> None:
    run = OnDisk(start, tmp_path, frail_disk)
    run.until_saved(1)
    for _ in range(2):
        frail_disk.freeze()
        try:
            time.sleep(1.5)  # the wait is the fault
        finally:
            frail_disk.thaw()
        run.until_saved(len(run.saved()) + 1)
    assert run.program.end() == 0, run.program.stderr
    run.is_as(undisturbed)


@pytest.mark.slow
def test_a_checkpoint_that_was_damaged_meanwhile_is_passed_over_if_no_worker_is_left(
    start: Start, tmp_path: Path, undisturbed: RunFolder
) -> None:
    run = OnDisk(start, tmp_path)
    run.until_saved(2)
    workers = {e["worker"]: e["pid"] for e in run.told("worker_joined")}
    for pid in workers.values():
        os.kill(int(str(pid)), signal.SIGSTOP)  # nobody saves any more
    newest, path = max(published(run.path / "checkpoints"))
    model = path / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    for pid in workers.values():
        os.kill(int(str(pid)), signal.SIGKILL)
    assert run.program.end() == 0, run.program.stderr
    (back,) = run.told("went_back")
    assert 0 < int(str(back["resumed_step"])) < newest
    assert any("An earlier checkpoint is used." in str(e["text"]) for e in run.told("warning"))
    run.is_as(undisturbed)


def is_renamed(run: Path) -> None:
    run.rename(run.with_name("moved"))


def is_removed(run: Path) -> None:
    run.rename(run.with_name("removed"))  # in one go: somebody may write in it
    shutil.rmtree(run.with_name("removed"), ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [is_renamed, is_removed])
def test_a_removed_run_folder_ends_the_run_and_is_not_created_again(
    start: Start, tmp_path: Path, undisturbed: RunFolder, harm: Callable[[Path], None]
) -> None:
    run = OnDisk(start, tmp_path)
    run.until_saved(1)
    harm(run.path)
    assert run.program.end() == 6, run.program.stderr
    assert f"the run folder {run.path} was removed or renamed" in run.program.error
    assert "Traceback" not in run.program.stderr
    run.program.check_no_process_is_left()
    assert not run.path.exists()
    if harm is is_renamed:
        run.path = run.path.with_name("moved")
        run.goes_on(start, undisturbed)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda ledger: os.truncate(ledger, 300), "has 300 bytes, and"),
        (os.unlink, "was removed, renamed or replaced during the run"),
    ],
)
@pytest.mark.slow
def test_a_ledger_that_is_damaged_meanwhile_ends_the_run(
    start: Start, tmp_path: Path, harm: Callable[[Path], None], told: str
) -> None:
    run = OnDisk(start, tmp_path)
    run.until_saved(1)
    harm(run.path / "ledger.bin")
    assert run.program.end() == 6, run.program.stderr
    assert f"{run.path}/ledger.bin {told}" in run.program.error.splitlines()[0]
    assert "Traceback" not in run.program.stderr
    run.program.check_no_process_is_left()
