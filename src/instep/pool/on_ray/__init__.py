"""Hosts of a pool on the nodes of a Ray cluster. Way in: `run.main`."""
