"""Says before anything starts whether a job would run, and what it would be: `instep check`.

Everything happens in this process, and no file is written. Way in: `check.py:check_job`.
"""
