"""How one process computes its share of every step and commits it.

Way in: `process.main` for a recipe, `own/` for a user's loop. `loop.py` is the main loop, `step/`
takes each step from its passes to a commit, `trial/` tests before the first step whether cutting a
batch changes the result. The master decides who is a member.
"""
