"""A dataset whose parts lie on the disks of different hosts.

`cut.py` cuts shards into parts, and `order.py` draws micro-batches from them: both follow from the
job and the manifest, whatever lies where. `near.py` deals micro-batches to workers that have their
samples. `door.py` gives samples to other hosts, and `peers.py` gets them.
"""
