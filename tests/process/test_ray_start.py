"""A Ray cluster that is started for a run on a busy machine."""

from pathlib import Path

import pytest
from test_ray import short_folder

from instep.launch.ray.cluster import connect

pytestmark = pytest.mark.process

__all__ = ["short_folder"]  # the fixture

SLOW = """
import sys, time

if any(word.endswith("dashboard/agent.py") for word in sys.orig_argv):
    time.sleep(20)
"""


@pytest.mark.slow
def test_a_node_starts_whose_agent_takes_longer_than_ray_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_folder: None
) -> None:
    pytest.importorskip("ray")
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ray, _ = connect("local", 2)
    try:
        assert ray.get(ray.remote(lambda: 17).remote()) == 17
    finally:
        ray.shutdown()
