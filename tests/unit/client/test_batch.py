"""The batch script of a job: what it asks Slurm for, and what is refused before it is written."""

import subprocess

import pytest

from instep.client.batch import check_size, script
from instep.errors import SpecError
from instep.job.file import build
from instep.launch.slurm_options import sbatch_options


def job_with(**launch):
    table = {"name": "net", "recipe": "a.py:a", "workers": 5, "network": "private"}
    return build({**table, "launch": {"on": "slurm", **launch}}, source="a test")


def asked_for(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]


def test_it_asks_for_a_task_for_each_worker_and_goes_on_without_a_lost_node(tmp_path):
    asked = asked_for(script(job_with(), tmp_path / "net.slurm", [], json_output=False))
    assert {"--ntasks=5", "--no-kill", "--requeue", "--signal=B:USR1@60"} <= set(asked)
    assert not any(each.startswith(("--nodes", "--cpus", "--gpus")) for each in asked)


def test_cores_of_a_node_are_shared_by_its_tasks(tmp_path):
    job = job_with(nodes=2, cpus=7, gpus=4, options={"signal": "USR2@120"})
    asked = asked_for(script(job, tmp_path / "net.slurm", [], json_output=False))
    assert {"--nodes=2", "--cpus-per-task=3", "--gpus-per-node=4"} <= set(asked)
    assert "--signal=B:USR2@120" in asked


@pytest.mark.parametrize("folder", ["net.slurm", "a folder's/net.slurm"])
def test_a_shell_understands_it(tmp_path, folder):
    text = script(job_with(), tmp_path / folder, ["--time=2"], json_output=True)
    subprocess.run(["sh", "-n"], input=text, text=True, check=True)
    assert asked_for(text)[-1] == "--time=2"


def test_options_are_those_of_sbatch():
    given = {"partition": "long", "time": 30, "exclusive": True, "signal": "HUP@90"}
    assert sbatch_options(given) == ["--partition=long", "--time=30", "--exclusive"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nodes": 3}, "launch.options.nodes: .* nodes, cpus and gpus are keys of"),
        ({"Partition": "long"}, "launch.options.Partition: needs a long option of sbatch"),
        ({"time": 1.5}, "launch.options.time = 1.5: needs text, a whole number, or true"),
        ({"comment": "a\n#SBATCH --uid=0"}, "launch.options.comment = .*: needs text"),
        ({"signal": "TERM@60"}, "signal = 'TERM@60': needs a signal and how many seconds before"),
        ({"signal": "USR1@0"}, "from 1 to 65535, such as 'USR1@60'. Known: USR1, USR2,"),
        ({"signal": 10}, "launch.options.signal = 10: needs a signal"),
        ({"next": "sbatch"}, "launch.options.next = 'sbatch': needs 'requeue', .* or 'submit'"),
    ],
)
def test_other_options_are_refused(options, says):
    with pytest.raises(SpecError, match=says):
        sbatch_options(options)


def test_a_partition_of_a_thousand_nodes_is_counted(tmp_path, monkeypatch):
    """`sinfo` writes 1K for 1,024 nodes if it may; a real Slurm of so many is too large here."""
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        '#!/bin/sh\ncase "$*" in *--noconvert*) echo "all* 1024";; *) echo "all* 1K";; esac\n'
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check_size(job_with(nodes=1024))
    with pytest.raises(
        SpecError, match=r"launch.nodes = 1025, and .* are: all 1024. Ask for fewer"
    ):
        check_size(job_with(nodes=1025))
