"""Many jobs on the cores of a machine: who has how many workers, who waits, and why.

A scheduler says three words to a run: start, scale, stop. It reads run folders and locks, no run
needs it, and killed it disturbs none. Ways in: `scheduler.py`, `policy.py`.
"""
