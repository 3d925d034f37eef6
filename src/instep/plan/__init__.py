"""Prices ways of training a job: how long a step takes, what it is made of, and which way pays.

Pure arithmetic on figures that were measured elsewhere (`lab/plan/`). Nothing here starts a
process, reads a file or a clock, or imports torch. `machine.py` and `measured.py` say what is
known, `ways.py` what could be done, `steps.py` simulates one step, `pricing.py` puts these
together, `search.py` ranks, and `explain.py` says why. Way in: `search.py:search`.
"""
