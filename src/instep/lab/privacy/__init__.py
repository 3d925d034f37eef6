"""An attack on the private step of a job, by canaries. Way in: `attack.py:attack_job`."""
