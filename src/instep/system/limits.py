"""How long a process of a run may get nothing done: the limits by which every role is watched."""

from __future__ import annotations

FLOOR_S = 1.2
"""Nobody hangs before; with the replacement a run stands still for less than 2 s. More than
`connection.LEASE_S`, after which who is cut off commits nothing."""

STEPS = 2.5
"""How many learnt step times may pass without anything getting done."""

UNKNOWN_S = 30.0
"""How long something may take that this run has not seen the end of, a read may stall, all workers
may stand still at once, and a process may be silent that gets ready: an import may hold the
interpreter's lock for long."""

BUSY = 0.25
"""Who has a processor for a smaller share of the time rather waits; others may be using it too."""
