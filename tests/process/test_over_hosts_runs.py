"""Runs with several workers on each of several hosts: what crosses the links, and the result."""

from pathlib import Path

import pytest
from started import RECIPES, Start
from test_partitions import needs_hosts

from instep.lab import netlab

pytestmark = [pytest.mark.process, needs_hosts]

STEPS = 12
MODEL_BYTES = 4 * (7 * 55_000 + 55_000 * 3 + 3)


def job_of(folder: Path, determinism: str, hosts: list[str], address: str) -> Path:
    job = folder / f"{determinism}-{len(hosts)}.toml"
    launch = f'[launch]\nhosts = {hosts!r}\naddress = "{address}"\n' if hosts else ""
    job.write_text(
        f'name = "wide"\nrecipe = "{RECIPES / "wide.py"}:recipe"\nseed = 5\nnetwork = "private"\n'
        f"workers = {4 if hosts else 1}\n[train]\nsteps = {STEPS}\nglobal_batch = 16\n"
        f'determinism = "{determinism}"\n{launch}'
    )
    return job


@pytest.mark.slow
def test_what_leaves_a_host_is_what_one_worker_would_send_and_the_bits_are_the_same(
    start: Start, tmp_path: Path
):
    alone = start("-m", "instep", "run", job_of(tmp_path, "bits", [], ""))
    assert alone.end() == 0, alone.stderr
    with netlab.Network(2) as network:
        hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
        address = network.address(netlab.OUTSIDE)
        same = start("-m", "instep", "run", job_of(tmp_path, "bits", hosts, address))
        assert same.end() == 0, same.stderr
        before = [network.traffic(host).sent_bytes for host in network.hosts]
        fast = start("-m", "instep", "run", job_of(tmp_path, "order", hosts, address))
        assert fast.end() == 0, fast.stderr
        after = [network.traffic(host).sent_bytes for host in network.hosts]
    assert same.summary["parameters_sha256"] == alone.summary["parameters_sha256"]
    for sent in (now - then for now, then in zip(after, before, strict=True)):
        of_a_step = sent / STEPS / MODEL_BYTES
        assert 1.0 < of_a_step < 1.25, of_a_step  # 1.5 in a ring of four, and 3 if hosts alternate
