"""What Ray leaves of a node that it gave up is ended, and nothing else."""

import subprocess
import sys

import psutil

from instep.launch.ray.cluster import _end


def test_only_programs_of_ray_are_ended_though_all_lie_below_a_folder_of_that_name(tmp_path):
    package = tmp_path / "ray/lib/ray"
    words = [str(package / "raylet"), str(tmp_path / "ray/bin/python"), f"{package}-own/train.py"]
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = [subprocess.Popen([*sleep, word]) for word in words]
    try:
        _end([psutil.Process(each.pid) for each in started], package)
        assert not psutil.pid_exists(started[0].pid)
        assert [each.poll() for each in started[1:]] == [None, None]
    finally:
        for each in started:
            each.kill()
            each.wait()
