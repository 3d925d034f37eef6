"""The loop that the user writes, by the conventions of Accelerate.

Way in: `loop.OwnLoop`, behind `instep.session`. Steps and commits are those of every run
(`engine/`); here is what stands between them and the user's code.
"""
