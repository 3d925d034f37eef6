"""Shards that lie on one host of a run, for workers of the others."""
