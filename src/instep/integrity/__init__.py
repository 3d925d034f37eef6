"""Observers of a worker's steps, which check whether its results are right.

Way in: `worker/loop/observed.py` has a table of observers; the engine calls them at each moment of
a step (`engine/observers.py`). An observer reports what it finds by raising an error.
"""
