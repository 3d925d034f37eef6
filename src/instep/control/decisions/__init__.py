"""The decisions of the master: pure functions of the run's state and an event."""
