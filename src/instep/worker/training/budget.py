"""The noise of a private run, and what it is worth, found before any process of the run starts.

Both follow from how many samples there are, which only the recipe knows. It is built in a process
of its own, which then computes epsilon and may take a minute (`client/preparing.py:as_run`). Way
in: `settled`.
"""

from __future__ import annotations

import sys
import tomllib

from msgspec.structs import replace

from instep.errors import InstepError
from instep.job import file as spec_file
from instep.job.privacy import PrivacySpec
from instep.job.spec import JobSpec
from instep.privacy.accounting import SampledSteps, bounds, noise_for, steps_within
from instep.privacy.found import told
from instep.privacy.units import Units
from instep.recipe.build import call
from instep.recipe.source_file import load_function
from instep.worker.reading.data_split import split_data
from instep.worker.reading.streamed import with_stream


def settled(job: JobSpec) -> PrivacySpec:
    """The section with all that follows from the number of samples.

    Raises:
        InstepError: the budget is not enough, a library is missing, or the recipe cannot be built.
    """
    recipe = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
    samples = len(split_data(job, with_stream(job, recipe)).recipe.train)
    spec = job.privacy
    in_epoch = Units.of_job(job, samples).in_epoch
    steps = job.train.steps or job.train.passes * in_epoch
    plan = SampledSteps(spec.sampling, in_epoch, steps)
    epsilon, delta, noise = spec.epsilon, spec.delta or 0.0, spec.noise
    if epsilon is not None and noise is not None:
        plan = plan._replace(steps=steps_within(plan, noise, epsilon, delta))
    elif noise is None:
        noise = noise_for(plan, epsilon or 0.0, delta)
    upper, lower = bounds(plan, noise, delta)
    found = {"samples": float(samples), "steps": float(plan.steps), "in_epoch": float(in_epoch)}
    found |= {"epsilon": upper, "epsilon_lower": lower}
    return replace(spec, noise=noise, accounted=found)


def main() -> int:
    """Read a job from standard input, and print what was found for it."""
    try:
        job = spec_file.build(tomllib.loads(sys.stdin.read()), source="standard input")
        line = told(settled(job))
    except InstepError as error:
        line = told(error)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
