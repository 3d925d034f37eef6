"""Observers of a worker's steps, which check whether its results are right.

Way in: `worker/observed.py` has a table of observers; the engine calls them at each moment of a
step (`worker/step/observers.py`). An observer reports what it finds by raising an error.
"""
