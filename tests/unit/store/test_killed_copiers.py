"""A copier that is killed in the middle of writing an object: no half of one counts, or stays."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_copies import Run, step_in

pytestmark = pytest.mark.process

KILLED = """
import os, signal, sys
from pathlib import Path
from instep.store.copies import follow, objects

write, chunks, now = objects.Objects._write, objects._chunks, []
objects._CHUNK = 1 << 16

def noting(self, url, *rest):
    now[:] = [url]
    return write(self, url, *rest)

def in_halves(source):
    for data in chunks(source):
        yield data[: len(data) // 2]
        if sys.argv[2] in now[0]:
            left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        yield data[len(data) // 2 :]

left = [int(sys.argv[3])]
objects.Objects._write, objects._chunks = noting, in_halves
follow.follow(Path(sys.argv[1]), lambda *_, **__: None, lambda _: True)
"""


@pytest.mark.parametrize(
    ("name", "chunk"), [("records/", 2), ("model.safetensors", 7), ("copy.json", 1)]
)
def test_a_copier_that_is_killed_within_an_object_leaves_no_half_that_counts(tmp_path, name, chunk):
    run = Run(tmp_path, str(tmp_path / "copies"))
    run.save(10)
    assert not run.copy()
    before = {path: path.read_bytes() for path in (tmp_path / "copies").rglob("*.*")}
    run.save(20, size=200_000)
    words = [sys.executable, "-c", KILLED, str(run.path), name, str(chunk)]
    child = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert before == {path: path.read_bytes() for path in before}
    if name == "model.safetensors":
        (half,) = (tmp_path / "copies").rglob("step-00000020-*/model.safetensors")
        assert 0 < half.stat().st_size < (Path(run.newest) / name).stat().st_size
    assert step_in(run.restored(tmp_path)) == 10
    run.follow_anew()
    assert not run.copy()
    assert step_in(run.restored(tmp_path)) == 20
    (copied,) = (path.parent for path in (tmp_path / "copies").rglob("step-00000020-*/copy.json"))
    files = {path.name: path.read_bytes() for path in Path(run.newest).iterdir()}
    assert files == {
        path.name: path.read_bytes() for path in copied.iterdir() if path.name in files
    }
