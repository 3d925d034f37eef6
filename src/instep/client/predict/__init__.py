"""Predicts a whole dataset on worker processes. Way in: `command.predict`."""
