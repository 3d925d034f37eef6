"""Trials of a job with different values: which are tried, where each is, which is the best.

It starts runs as a user does, and reads their folders; no run needs it. Way in: `search.py`.
"""
