"""A Slurm whose nodes have addresses of their own: what instep sends between them is encrypted."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from started import RECIPES, Start, Started
from test_encrypted_hosts import Capture, is_tls
from test_join_run import train_on
from test_partitions import needs_hosts
from test_recovery import check_same_result, undisturbed

from instep.lab import netlab
from slurm import Slurm, why_not

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    needs_hosts,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

__all__ = ["undisturbed"]  # the fixture

STEPS = 300


def submit(start: Start, folder: Path, slurm: Slurm) -> Started:
    """A job that Slurm is to run on two nodes, and that says nothing of networks."""
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 2\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeterminism = "bits"\nvalidate_every = 40\n'
        "[arguments]\npause_s = 0.012\n[launch]\nnodes = 2\n"
    )
    return start("-m", "instep", "run", job, "--on", "slurm", environment=slurm.environment)


def test_nodes_of_two_jobs_carry_no_plain_byte_and_the_result_is_that_of_one_machine(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    (folder := tmp_path / "slurm").mkdir()
    with netlab.Network(3) as network:
        slurm = Slurm(folder, 3, network)
        try:
            capture = Capture(network, tmp_path)
            program = submit(start, tmp_path, slurm)
            run = program.work / "runs" / "disturbed"
            program.until(lambda: run.exists() and program.is_training(), "training")
            words = shlex.join([sys.executable, "-P", "-m", "instep", "join-run", str(run)])
            slurm.ask("sbatch", f"--output={tmp_path / 'joined'}", "--wrap", f"exec {words}")
            train_on(program, [0, 1, 2])
            assert program.end() == 0, program.stderr
            streams = [stream for stream in capture.streams(slurm.ports) if stream]
        finally:
            slurm.close()
    assert re.search(r"RUNNING on n\[0-1\]", program.stderr)
    check_same_result(program, undisturbed)
    assert program.events("run_started")[0]["encrypted"] is True
    assert "Traffic between hosts was encrypted" in (run / "report.html").read_text()
    assert len(streams) > 2 * (2 + 2)  # of fork servers and workers that are not beside the master
    assert sum(map(len, streams)) > 100 * STEPS
    assert all(map(is_tls, streams))
    program.check_no_process_is_left()
