"""A script whose run lasts for a while; with a number below 0, process 1 raises after that step.

A fourth argument is the number of loader processes.
"""

import sys

import slow_tiny

import instep

if __name__ == "__main__":
    runs, steps, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    with instep.join(
        slow_tiny.recipe,
        arguments={"pause_s": pause_s},
        name="long",
        runs=runs,
        data={"loaders": int(sys.argv[4])} if len(sys.argv) > 4 else {},
        train={"steps": abs(steps), "global_batch": 16, "determinism": "bits"},
    ) as session:
        for step in session.steps():
            if steps < 0 and session.rank == 1 and step.number == abs(steps) - 10:
                raise ValueError("process 1 has had enough")
