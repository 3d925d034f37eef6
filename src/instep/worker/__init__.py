"""How one process computes its share of every step and commits it.

Way in: `process.main` for a recipe, `own/` for a user's loop. `loop.py` is the way through a run,
`step/` takes each step from its passes to a commit, `trial/` looks before the first one whether
cutting a batch changes the result. Who else is a member is told by the master, and never decided
here.
"""
