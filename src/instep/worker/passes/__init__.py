"""Passes that processes compute together, or over a whole dataset."""
