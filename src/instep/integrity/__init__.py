"""Whether what was computed can be believed: observers of a worker's steps.

Way in: `worker` names each observer in a table, and calls it at the moments of a step
(`worker/step/observers.py`). What an observer finds it tells by raising; a step without observers
does not know of them.
"""
