"""How one process computes its share of every step and commits it.

Way in: `process.main` for a recipe, `own_loop` for a user's loop; `replica` holds the middle of
a step. Who else is a member is told by the master, and never decided here.
"""
