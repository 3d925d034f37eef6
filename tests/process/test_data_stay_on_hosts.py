"""Participants whose sums are secure, on hosts of which each has the data of its own: what a host's
processes read is its own, the bits are those of an open run, and a lost host's are missed."""

import shutil
from pathlib import Path

import psutil
import pytest
from parts import SAMPLES, SHARDS, samples
from started import RECIPES, Start, Started, kill, newest_pids

from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, write_manifest
from instep.data.shards.writer import ShardWriter
from instep.events import Kind
from marks import slow

pytestmark = pytest.mark.process

PARTS, EACH = 4, SAMPLES // SHARDS
FIRST, SECOND = range(SHARDS // 2), range(SHARDS // 2, SHARDS)
SEALED = ("sync.options.secure_sums=true",)


def disk(folder: Path, shards: range, name: str = "") -> None:
    """A host's folder with some of the shards."""
    made = samples()
    columns, every = encode(made, None).columns, []
    (place := folder / "disks" / name).mkdir(parents=True)
    for number in range(SHARDS):
        path = place / f"{number:02}.arrow"
        with ShardWriter(path, columns) as writer:
            part = made[number * EACH : (number + 1) * EACH]
            writer.write(encode(part, columns).views)
            writer.close()
        every.append(Shard(path.name, EACH, writer.bytes))
        if number not in shards:
            path.unlink()
    size = sum(each.bytes for each in every)
    manifest = Manifest(
        columns=columns, samples=SAMPLES, bytes=size, sha256="of these", bad=0, shards=every
    )
    write_manifest(place, manifest)


def begin(start: Start, folder: Path, hosts: list[str], *more: str, steps: int = 12) -> Started:
    """A run with a worker on each host, which begins by a script of its own; or with one here."""
    words = []
    for host in hosts:
        script = folder / f"{host}.sh"
        there = f"[ -e {folder}/disks/{host} ] || exit 1"
        script.write_text(f'#!/bin/sh\n{there}\nDISK={host} exec "$@"\n')
        script.chmod(0o755)
        words.append(f'"{script}"')
    job = folder / "job.toml"
    job.write_text(
        f'name = "bound"\nrecipe = "{RECIPES / "bound.py"}:recipe"\nworkers = {len(hosts) or 1}\n'
        f"seed = 3\n[train]\nsteps = {steps}\nglobal_batch = 24\nthreads = 1\n"
        'determinism = "bits"\n[data]\norder = "windowed"\nwindow = 120\n'
        f"parts = {PARTS}\n"
        f'[sync]\nname = "averaging"\nparticipants = {PARTS}\n'
        '[sync.options]\npartition = "parts"\nlocal_steps = 2\nclip = 0.5\n'
        f'[arguments]\nfolder = "{folder / "disks"}"\n'
        + (f'[launch]\nhosts = [{", ".join(words)}]\naddress = "127.0.0.1"\n' if words else "")
    )
    sets = [word for setting in more for word in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def check_stayed(program: Started, folder: Path, hosts: dict[str, range]) -> None:
    """Neither a door gave a sample, nor did a process of a host make one of another's."""
    given = program.events("samples_given")
    assert sum(event["samples"] + event["bytes"] for event in given) == 0
    first = {float(each["x"][0]).hex(): n for n, each in enumerate(samples())}
    for host, shards in hosts.items():
        seen = {first[line] for line in (folder / "disks" / f"{host}.seen").read_text().split()}
        own = {n for n in range(SAMPLES) if n // EACH in shards}
        assert seen <= own
        assert len(seen) > len(own) // 2


@pytest.mark.tail
@pytest.mark.parametrize("loaders", ["1", slow("auto")])
def test_no_sample_leaves_its_host_and_the_bits_are_those_of_an_open_run_after_a_kill_too(
    loaders: str, start: Start, tmp_path: Path
) -> None:
    (whole := tmp_path / "whole").mkdir()
    disk(whole, range(SHARDS), "all")
    opened = begin(start, whole, [])
    assert opened.end() == 0, opened.stderr
    (apart := tmp_path / "apart").mkdir()
    disk(apart, SECOND, "h0")
    disk(apart, FIRST, "h1")
    more = (*SEALED, f"data.loaders={loaders}", "arguments.pause_s=0.05")
    program = begin(start, apart, ["h0", "h1"], *more)
    program.until(lambda: program.is_training() and len(program.ledger) > 8, "it trains")
    kill(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    assert program.summary["generations"] > 1
    assert program.summary["parameters_sha256"] == opened.summary["parameters_sha256"]
    counted = ("repeated_samples", "missing_samples", "away_samples")
    assert [program.summary[name] for name in counted] == [0, 0, 0]
    check_stayed(program, apart, {"h0": SECOND, "h1": FIRST})
    placed = program.events("parts_placed")[-1]["held"]
    assert placed == {"0": [0, 0, 120, 120], "1": [120, 120, 0, 0]}


@pytest.mark.slow
def test_participants_of_a_lost_host_are_missed_and_read_nowhere_else(
    start: Start, tmp_path: Path
) -> None:
    for name, shards in (("h0", range(18)), ("h1", range(18, SHARDS))):
        disk(tmp_path, shards, name)
    program = begin(start, tmp_path, ["h0", "h1"], *SEALED, "arguments.pause_s=0.2", steps=40)
    program.until(lambda: program.is_training() and len(program.ledger) > 12, "it trains")
    (lost,) = [e for e in program.events("worker_joined") if e["host"] == 1]
    shutil.rmtree(tmp_path / "disks" / "h1")
    fork_server = psutil.Process(lost["pid"]).parent()
    assert fork_server is not None
    for each in (fork_server, *fork_server.children(recursive=True)):
        each.kill()
    assert program.end() == 0, program.stderr
    away = program.ledger[program.ledger["kind"] == Kind.AWAY]
    assert len(away) > 4
    assert set(away["unit"].tolist()) == {3}  # of the last part
    assert program.summary["away_samples"] == int((away["stop"] - away["first"]).sum())
    counted = program.summary["repeated_samples"], program.summary["missing_samples"]
    assert counted == (0, 0)
    assert "passed over as their host was lost" in program.stdout + program.stderr
    check_stayed(program, tmp_path, {"h0": range(18)})
    audited = start("-m", "instep", "audit", program.run)
    assert audited.end() == 0, audited.stderr
    assert "a participant was missing: the host that has its data was lost" in audited.stdout


@pytest.mark.slow
def test_a_host_without_the_data_of_any_participant_is_refused(
    start: Start, tmp_path: Path
) -> None:
    for name, shards in (("h0", range(SHARDS)), ("h1", range(3))):
        disk(tmp_path, shards, name)
    program = begin(start, tmp_path, ["h0", "h1"], *SEALED)
    assert program.end() == 4, program.stderr
    assert "has the data of no participant" in program.error
