"""How long a process of a run may make no progress: the timeouts of every watchdog."""

from __future__ import annotations

FLOOR_S = 1.2
"""The shortest timeout: with the replacement a run pauses for less than 2 s. It is longer than
`heartbeat_lease.LEASE_S`, after which a worker that is cut off commits nothing."""

LOOK_S = FLOOR_S / 4
"""A watchdog that looks more rarely did not run itself: no more is counted at a time."""

STEPS = 2.5
"""How many measured step times may pass without progress."""

UNKNOWN_S = 30.0
"""The timeout of what this run has no measured time for, of a read that stalls, of all workers
standing still at once, and of a process that starts up: an import may hold the interpreter's
lock for long."""

BUSY = 0.25
"""A process that uses less than this share of a core is taken to be waiting, not computing."""
