"""Says before anything starts which way of training a job is fastest, and whether it pays.

Processes that are thrown away measure (`prober.py`); `instep.plan` computes. No file is left. Way
in: `plan.py:plan_job`.
"""
