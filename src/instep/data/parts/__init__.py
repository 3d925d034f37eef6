"""A dataset whose parts lie on the disks of different hosts: which samples go together, and where.

`cut.py` cuts shards into parts, and `order.py` draws micro-batches from them: both follow from the
job and the manifest, whatever lies where. `near.py` deals micro-batches to workers that have their
samples. How samples of other hosts come here, `shards/peers.py` knows.
"""
