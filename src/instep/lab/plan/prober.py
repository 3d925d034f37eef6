"""The program that probes: imports torch and the recipe once, and forks a crew for each way.

What it is to do comes as one line of JSON on standard input, and each result leaves as one on
standard output. It has threads of no kind, as a fork breaks them. Its parent ends it.
Way in: `main`; `probe.py` is the other side, and `crew.py` has the crews.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from instep.engine.trial_result import Trial
from instep.job import file as spec_file
from instep.lab.plan.crew import ProbingCrew, told
from instep.recipe.quick_start import spare_dynamo
from instep.recipe.source_file import load_function
from instep.system.processes import die_with_parent


def main() -> None:
    """Probe what standard input asks for."""
    die_with_parent(signal.SIGKILL)
    asked = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the recipe prints is no result
    sys.dont_write_bytecode = True
    spare_dynamo()
    jobs = [spec_file.build(tomllib.loads(each["job"]), source="plan") for each in asked["crews"]]
    function, why = None, {}
    try:
        function = load_function(jobs[0].recipe, places=jobs[0].python_path)
    except BaseException as error:
        why = told(error)
    gc.freeze()
    trial = Trial.read(asked["trial"].encode())
    began, folder, taken = time.time(), Path(asked["folder"]), 0
    for number, (job, each) in enumerate(zip(jobs, asked["crews"], strict=True)):
        if taken and time.time() + (time.time() - began) / taken > asked["until"]:
            break  # another one would take as long as those before
        found = why if job.mesh.ranks == 1 else {}
        if not found:
            found, taken = (
                ProbingCrew(job, each, asked, folder).run_apart(function, trial),
                taken + 1,
            )
        if trial is None and found.get("ranks"):
            trial = Trial.read(found["ranks"][0]["trial"].encode())
        print(json.dumps({"crew": number, **found}), file=out, flush=True)
        if function is None:
            break
        if number == 0 and "failed" in found:  # whoever has the whole model fails alike
            why = {**found, "failed": f"as one process: {found['failed']}"}


if __name__ == "__main__":
    main()
