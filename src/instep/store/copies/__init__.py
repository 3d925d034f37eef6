"""Copies of a run's checkpoints on another file system, from which it resumes anywhere.

`follow.py` is a process beside the run, which copies what is new (`upload.py`), and removes old
copies by the rule of local ones; no step waits for it. `restore.py` makes a run folder of the
newest copy that is whole. `layout.py` says what a copy is.
"""
