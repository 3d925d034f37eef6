"""`instep compare`: alternatives run in turns with the same samples, and what is done is kept."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from started import RECIPES, Start

from instep.cli import main
from instep.lab import netlab
from instep.store.run_folder import RunFolder

NO = netlab.why_not()
ON_HOSTS = pytest.mark.skipif(NO is not None, reason=str(NO))
pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]
PARAMETERS = 6 * 16 + 16 + 16 * 3 + 3
ROUNDS = "sync.name=averaging,sync.participants=4,sync.options.local_steps=4"


def job_file(folder: Path, recipe: str = "tiny") -> Path:
    job = folder / "job.toml"
    job.write_text(
        f'name = "tiny"\nrecipe = "{RECIPES / recipe}.py:recipe"\nseed = 5\n'
        "[train]\nsteps = 16\nglobal_batch = 16\nvalidate_every = 4\n"
    )
    return job


def answer(out: Out) -> tuple[dict[str, Any], str]:
    """The object of `--json`, and what was said meanwhile."""
    said = out.readouterr()
    found: dict[str, Any] = json.loads(said.out.splitlines()[-1])
    return found, said.err


def done(folder: str) -> list[str]:
    return [run["folder"] for run in json.loads(Path(folder, "compare.json").read_text())["done"]]


@pytest.mark.tail
def test_a_comparison_runs_each_once_in_a_turn_and_not_again(tmp_path: Path, capsys: Out) -> None:
    job = job_file(tmp_path)
    asked = ["compare", str(job), "--with", ROUNDS, "--runs", str(tmp_path / "runs")]
    assert main([*asked, "--repeats", "1", "--json"]) == 0
    found, _ = answer(capsys)
    plain, rounds = found["alternatives"]
    assert (plain["name"], rounds["name"]) == ("unchanged", ROUNDS)
    folders = [Path(found["folder"]) / name for name in done(found["folder"])]
    base, other = map(RunFolder, folders)
    assert (base.spec.train.steps, other.spec.train.steps) == (16, 4)
    assert base.spec.seed == other.spec.seed == 5
    # both workers send the parameters once a step, or once a round; and what a run says meanwhile
    assert plain["sent_bytes"] >= 2 * 16 * PARAMETERS * 4
    assert rounds["sent_bytes"] >= 2 * 4 * PARAMETERS * 4
    assert rounds["of_bytes"]["value"] == pytest.approx(
        rounds["sent_bytes"] / plain["sent_bytes"], rel=1e-3
    )
    page = Path(found["page"]).read_text()
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.S)[0])
    assert data["runs"] == ["unchanged", ROUNDS]
    assert data["charts"][0]["lines"][0]["bytes"][-1] > 0
    assert "Settings that differ" in page
    assert main([*asked, "--repeats", "1"]) == 0
    said = capsys.readouterr()
    assert "2 runs done" in said.err
    assert "turn 1" not in said.err
    assert "one turn says nothing about certainty" in said.out


def test_what_cannot_be_compared_is_refused_before_anything_starts(
    tmp_path: Path, capsys: Out
) -> None:
    job, runs = job_file(tmp_path), tmp_path / "runs"
    for options, told in [
        (["--with", "sync.codec=int9"], "no codec is called 'int9'"),
        (["--with", "workers=1", "--repeats", "0"], "--repeats 0"),
        (["--with", "workers=1", "--rate", "1mbit"], "needs --hosts"),
        (["--with", "workers=1", "--hosts", "3"], "Add --workers 3"),
        (["--with", "workers=1", "--hosts", "2", "--rate", "fast"], "rate 'fast'"),
    ]:
        assert main(["compare", str(job), "--runs", str(runs), *options]) == 2
        assert told in capsys.readouterr().err
    assert not runs.exists()


@pytest.mark.slow
def test_an_alternative_that_fails_is_said_and_the_others_go_on(
    tmp_path: Path, capsys: Out
) -> None:
    changes = ["--with", "arguments.wrong=1", "--with", "workers=1"]
    asked = ["compare", str(job_file(tmp_path)), *changes, "--runs", str(tmp_path / "runs")]
    assert main([*asked, "--repeats", "2", "--json"]) == 5
    found, said = answer(capsys)
    _, wrong, one = found["alternatives"]
    assert "does not take" in wrong["failed"]
    assert wrong["failed"] in said
    assert one["turns"] == 2
    assert one["of_seconds"]["high"] < 1e9
    seeds = [RunFolder(Path(found["folder"], f"workers-1-{n}")).spec.seed for n in (1, 2)]
    assert seeds == [5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_continues_where_it_was(
    start: Start, tmp_path: Path, number: int
) -> None:
    job = job_file(tmp_path, "slow_tiny")
    asked = ["-m", "instep", "compare", job, "--with", "workers=1", "--repeats", "1", "--json"]
    program = start(*asked)
    folder = program.work / "runs" / "tiny-compare"
    begun = folder / "workers-1-1" / "ledger.bin"
    program.until(begun.exists, "in its second run")
    program.process.send_signal(number)
    assert program.end() == 130
    assert "the same command continues" in program.stderr
    assert done(str(folder)) == ["unchanged-1"]
    program.check_no_process_is_left()
    first = (folder / "unchanged-1" / "run.id").read_text()
    again = [*map(str, asked[2:]), "--runs", str(folder.parent)]
    assert main(again) == 0
    assert done(str(folder)) == ["unchanged-1", "workers-1-1"]
    assert (folder / "unchanged-1" / "run.id").read_text() == first


@pytest.mark.slow
@ON_HOSTS
def test_on_slow_hosts_what_sends_less_pays(tmp_path: Path, capsys: Out) -> None:
    job = tmp_path / "job.toml"
    recipe = Path(__file__).resolve().parents[2] / "benchmarks" / "recipes" / "mlp.py"
    job.write_text(f'name = "mlp"\nrecipe = "{recipe}:recipe"\n[train]\nsteps = 12\n')
    asked = ["compare", str(job), "--with", "sync.codec=int8", "--runs", str(tmp_path / "runs")]
    assert main([*asked, "--hosts", "2", "--rate", "20mbit", "--json"]) == 0
    found, _ = answer(capsys)
    _, int8 = found["alternatives"]
    assert int8["pays"]
    assert int8["of_bytes"]["high"] < 0.35
    assert found["turns"] >= 3
    run = RunFolder(Path(found["folder"], "unchanged-1"))
    assert run.spec.network == "private"
    assert len(run.spec.launch.hosts) == 2
