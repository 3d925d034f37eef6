"""A recipe of 14 steps that is gone on with if it is there. Arguments: folder of runs, seed."""

import json
import sys

import tiny

import instep

if __name__ == "__main__":
    train = {"epochs": 2, "global_batch": 16}
    session = instep.join(
        tiny.recipe,
        name="again",
        runs=sys.argv[1],
        seed=int(sys.argv[2]),
        train=train,
        quiet=True,
        resume=True,
    )
    steps = [step.number for step in session.steps()]
    print(json.dumps({"steps": steps, "step": session.step, "summary": session.summary}))
