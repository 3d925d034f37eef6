"""How one process computes its share of every step.

Way in: `training.Training` for a recipe, `own/` for a user's loop; `instep.process` is the main
program. `loop/` is the main loop, `trial/` tests before the first step whether cutting a batch
changes the result. The engine (`instep.engine`) commits; the master decides who is a member.
"""
