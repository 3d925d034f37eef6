"""Prepares data: raw files become shards, by a function of the user's, on several processes.

The files and the function fix the tasks (`plan.py`), so what is made never depends on how many
workers make it, or on what was killed. A task's result is a file that is there whole or not at all
(`folder.py`), so a command that was stopped continues. `workers/` has the processes, here and on
other machines, `task.py` says what each does, `assemble.py` puts the results together. Nothing here
imports torch. Way in: `prepare.prepare`.
"""
