"""The audit of a private run agrees with it, and finds each of the faults that are planted."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from test_private_runs import trained

from instep.cli import main
from instep.errors import SpecError
from instep.events import LEDGER, LEDGER_START
from instep.privacy import secret_files
from instep.privacy.released import FILE, RELEASE, Releases
from instep.report.figures.proof import prove_private
from instep.store.folder import id_of
from instep.store.run_folder import RunFolder
from lazily import needs

pytestmark = [pytest.mark.process, needs("dp_accounting")]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished private run, and the folder of its secret."""
    folder = tmp_path_factory.mktemp("private")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(secret_files.ENVIRONMENT, str(folder / "secrets"))
        yield trained(folder, 2, sampling="poisson").path, folder / "secrets"


@pytest.fixture
def run(done, tmp_path, monkeypatch):
    """A copy of it that may be spoilt."""
    path, secrets = done
    shutil.copytree(secrets, tmp_path / "secrets")
    monkeypatch.setenv(secret_files.ENVIRONMENT, str(tmp_path / "secrets"))
    shutil.copytree(path, tmp_path / "run")
    return tmp_path / "run"


def other_secret(run):
    (secret_files.folder() / id_of(run)).write_bytes(bytes(32))


def readable_secret(run):
    (secret_files.folder() / id_of(run)).chmod(0o644)


def secret_in_the_folder(run):
    (run / "notes.txt").write_bytes(b"x" + secret_files.load(id_of(run)) + b"y")


def published_twice(run):
    Releases(run).write(3, bytes(16))


def not_published(run):
    found = np.fromfile(run / FILE, RELEASE)
    found[found["commit"] != 5].tofile(run / FILE)


def other_places(run):
    with open(run / "ledger.bin", "r+b") as file:
        file.seek(LEDGER_START)
        records = np.frombuffer(file.read(), LEDGER).copy()
        place = np.flatnonzero(records["step"] == 4)[0]
        records["first"][place] += 30
        records["stop"][place] += 30
        file.seek(LEDGER_START)
        file.write(records.tobytes())


def another_epsilon(run):
    path = run / "job.toml"
    text = path.read_text()
    changed = re.sub(r"\bepsilon = [0-9.]+", "epsilon = 0.5", text)
    assert changed != text
    path.write_text(changed)


FAULTS = {
    other_secret: "not that of the run",
    readable_secret: "others may read",
    secret_in_the_folder: r"in the folder of the run \(notes.txt\)",
    published_twice: "step 3: published with more than one content",
    not_published: "step 5: committed, and no release",
    other_places: "step 4: other samples than the secret draws",
    another_epsilon: "and 0.5 is claimed",
}


@pytest.mark.tail
def test_a_run_agrees_with_its_secret_and_each_planted_fault_is_found(run, capsys, tmp_path):
    assert main(["audit", str(run), "--privacy", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["privacy"]
    assert found["exact"]
    assert found["epsilon"] == pytest.approx(found["claimed"])
    assert found["steps"] == found["released"] == 12
    for spoil, said in FAULTS.items():
        shutil.copytree(run, tmp_path / spoil.__name__)
        kept = secret_files.load(id_of(run))
        spoil(tmp_path / spoil.__name__)
        proof = prove_private(RunFolder(tmp_path / spoil.__name__))
        assert not proof.exact, spoil.__name__
        assert re.search(said, proof.fault), proof.fault
        file = secret_files.folder() / id_of(run)
        file.write_bytes(kept)
        file.chmod(0o600)


@pytest.mark.tail
def test_it_refuses_a_run_whose_secret_is_elsewhere_and_a_resume_with_another(run, capsys):
    other_secret(run)
    assert main(["audit", str(run), "--privacy"]) == 6
    with pytest.raises(SpecError, match="not that of the run"):
        Releases(run).begin(bytes(32))
    (secret_files.folder() / id_of(run)).unlink()
    assert main(["audit", str(run), "--privacy"]) == 2
    capsys.readouterr()
