"""Steps that are traced compute what they compute without, and each worker writes its file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from instep.cli import main
from instep.errors import SpecError
from instep.store.run_folder import RunFolder

RECIPE = Path(__file__).parent / "recipes" / "tiny.py"

pytestmark = pytest.mark.process


def trained(runs, *settings):
    job = runs / "job.toml"
    job.write_text(f'recipe = "{RECIPE}:recipe"\nworkers = 2\nname = "it"\n')
    base = ("train.steps=8", "train.threads=1", "train.determinism=bits")
    words = [word for each in (*base, *settings) for word in ("--set", each)]
    command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(runs), "--json"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_chosen_steps_are_traced_by_each_worker_and_the_result_is_the_same_bits(tmp_path):
    for name in ("plain", "traced"):
        (tmp_path / name).mkdir()
    plain = trained(tmp_path / "plain")
    traced = trained(tmp_path / "traced", "report.profile=[3, 5]")
    assert traced["parameters_sha256"] == plain["parameters_sha256"]
    run = tmp_path / "traced" / "it"
    told = RunFolder(run).named("steps_profiled")
    assert sorted((e["worker"], e["first"], e["last"]) for e in told) == [(0, 3, 5), (1, 3, 5)]
    for event in told:
        names = {
            each.get("name")
            for each in json.loads((run / event["path"]).read_text())["traceEvents"]
        }
        assert {"step 3", "step 4", "step 5"} <= names
        assert not {"step 2", "step 6"} & names
        assert any(str(name).startswith("aten::") for name in names)
        assert event["path"] in (run / "report.html").read_text()
    assert not (tmp_path / "plain" / "it" / "profile").exists()


def test_a_profile_of_steps_that_are_none_is_refused(tmp_path, capsys):
    job = tmp_path / "job.toml"
    job.write_text(f'recipe = "{RECIPE}:recipe"\n[report]\nprofile = [9, 3]\n')
    assert main(["run", str(job), "--runs", str(tmp_path)]) == SpecError.exit_code
    assert "needs the first and the last step to trace, such as [100, 103]" in (
        capsys.readouterr().err
    )
