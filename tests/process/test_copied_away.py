"""A run that starts from a model at a URL, and whose machine is lost, resumes from its copies."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from started import RECIPES, Start, kill, pid_of

import instep
from instep.store.run_folder import RunFolder
from lazily import needs
from loopback_store import Store, installed

pytestmark = [pytest.mark.process, needs("aiohttp")]

STEPS = 30 * 7
"""Many: the machine is lost long before they are done, however slowly copies are made."""

JOB = """
name = "lost"
recipe = "{recipe}:recipe"
workers = 2
seed = 5
[train]
epochs = 30
global_batch = 16
determinism = "bits"
[checkpoint]
every = 5
copy_to = "{copies}"
[start]
model = "{model}"
[arguments]
pause_s = 0.02
"""


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


def whole_copies(store: Store) -> dict[int, str]:
    """Step to run, of the copies that are whole."""
    found = (re.fullmatch(r"(.*)/step-(\d+)-.*/copy.json", name) for name in list(store.objects))
    return {int(each[2]): each[1] for each in found if each}


@pytest.mark.tail
def test_a_lost_run_resumes_elsewhere_from_its_copies_with_the_bits_of_an_undisturbed_one(
    start: Start, store: Store, tmp_path: Path
) -> None:
    torch.manual_seed(71)
    save_file(tiny.recipe().model.state_dict(), tmp_path / "model.safetensors")
    store.objects["models/model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    undisturbed = instep.train(
        f"{RECIPES / 'tiny.py'}:recipe",
        workers=1,
        runs=tmp_path / "runs",
        seed=5,
        quiet=True,
        train={"epochs": 30, "global_batch": 16, "determinism": "bits"},
        start={"model": str(tmp_path / "model.safetensors")},
    )
    path = f"{installed(tmp_path)}:{os.environ.get('PYTHONPATH', '')}"
    environment = {"PYTHONPATH": path, "INSTEP_CACHE": str(tmp_path / "cache")}
    job, model = tmp_path / "job.toml", f"{store.http}/models/model.safetensors"
    to = f"{store.loop}/copies"
    job.write_text(JOB.format(recipe=RECIPES / "slow_tiny.py", copies=to, model=model))
    program = start("-m", "instep", "run", job, environment=environment)
    killed = []

    def in_an_upload(method: str, name: str) -> None:
        if method == "PUT" and name.endswith("optimizer.safetensors") and not killed:
            killed.append(kill(pid_of(program, "master_started")))

    store.after = in_an_upload
    store.faults = lambda method, _, number: "503" if method == "PUT" and number % 31 == 7 else ""

    def copied() -> bool:
        replaced = killed and len(program.events("master_started")) == 2
        return bool(replaced and program.events("checkpoint_copied"))

    program.until(lambda: copied() and max(whole_copies(store)) >= 15, "copied")
    program.kill()
    program.check_no_process_is_left()
    assert killed == [True]
    shutil.rmtree(program.run)

    store.after, copies = (lambda *_: None), whole_copies(store)
    url = f"{store.loop}/{copies[max(copies)]}"
    again = start("-m", "instep", "resume", url, "--workers", "3", environment=environment)

    def once_the_copier(method: str, _: str) -> None:
        if method == "PUT" and len(killed) == 1:
            running = [p for p in again.processes() if "instep.store.copies.follow" in p.cmdline()]
            killed.extend(kill(each.pid) for each in running)

    store.after = once_the_copier
    assert again.end() == 0, again.stderr
    folder = RunFolder(again.run)
    assert folder.audit.exact
    assert [e["resumed_step"] for e in folder.named("run_started")[1:]] == [max(copies)]
    assert again.summary["parameters_sha256"] == undisturbed.summary["parameters_sha256"]
    assert killed == [True, True]
    assert max(whole_copies(store)) == STEPS
    assert f"copies  step {STEPS}  {url}  to resume from there: instep resume {url}" in again.stderr
    assert store.asked["GET models/model.safetensors"] == 1
    again.check_nothing_is_left()

    for name in [name for name in store.objects if name.endswith("copy.json")]:
        del store.objects[name]
    complete = start("-m", "instep", "resume", again.run, environment=environment)
    assert complete.end() == 2
    assert "is complete" in complete.error
    assert max(whole_copies(store)) == STEPS
