"""Who holds a run folder, or writes its ledger: nobody but its owner can stand in the way."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from instep.errors import RunError
from instep.job.spec import JobSpec
from instep.store.folder import ID, held, make_run_folder
from instep.store.ledger import Ledger

NOBODY = 65534


@pytest.fixture
def runs():
    """A folder that every user of the machine may look into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def tried_by_another_user(path):
    """Whether another user of this machine can lock a file, or could not open it."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        answer = b"locked"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except PermissionError:
            answer = b"refused"
        finally:
            os.write(write, answer)
            os._exit(0)
    os.close(write)
    answer = os.read(read, 64).decode()
    os.close(read)
    os.waitpid(pid, 0)
    return answer


def modes(folder):
    """Who may do what with the files whose locks hold a run."""
    return [stat.S_IMODE((folder / name).stat().st_mode) for name in (ID, "ledger.bin")]


@pytest.mark.parametrize("before", [None, 0o644])
def test_the_files_that_are_locked_are_their_owners_alone(runs, before):
    """Of a new run, and of one that an earlier version began."""
    folder = make_run_folder(runs, JobSpec(name="one", recipe="a.py:f"), named=True)
    if before is not None:
        for name in (ID, "ledger.bin"):
            (folder / name).touch()
            (folder / name).chmod(before)
    with held(folder):
        Ledger(folder / "ledger.bin").close()
    assert modes(folder) == [0o600, 0o600]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_hold_a_run_folder_or_its_ledger(runs):
    folder = make_run_folder(runs, JobSpec(name="one", recipe="a.py:f"), named=True)
    Ledger(folder / "ledger.bin").close()
    assert tried_by_another_user(folder / "job.toml") == "locked"  # so that this can fail
    assert tried_by_another_user(folder / ID) == "refused"
    assert tried_by_another_user(folder / "ledger.bin") == "refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_of_an_earlier_run_are_closed_to_others_too(runs):
    folder = make_run_folder(runs, JobSpec(name="one", recipe="a.py:f"), named=True)
    for name in (ID, "ledger.bin"):
        (folder / name).touch()
        (folder / name).chmod(0o644)
    with held(folder):
        Ledger(folder / "ledger.bin").close()
    assert tried_by_another_user(folder / ID) == "refused"
    assert tried_by_another_user(folder / "ledger.bin") == "refused"


@pytest.mark.parametrize("where", ["runs", "recipe", "resumed"])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(runs, where):
    strange = "ru\udcffns"
    if where == "resumed":
        begun = make_run_folder(runs, JobSpec(name="one", recipe="a.py:f"), named=True)
        folder = begun.rename(runs / strange)
        with pytest.raises(RunError, match=r"ru\\udcffns' has a name that is not UTF-8"):
            held(folder).__enter__()
        return
    recipe, place = ("a.py:f", runs / strange) if where == "runs" else (f"{strange}.py:f", runs)
    with pytest.raises(RunError, match=r"ru\\udcffns.* not UTF-8"):
        make_run_folder(place, JobSpec(name="one", recipe=recipe), named=True)
    assert not list(runs.iterdir())
