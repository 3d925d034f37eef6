"""Training without lockstep: a server leases micro-batches, and moves the parameters by each push.

`serving.py` is the server's end, `working.py` a worker's, and `line.py` the connection between
them. What a push does is in `commits.py`; who may push what is in `sync/servers/leases.py`.
"""
