"""How slices of the dataset become batches: in this process, in a thread, or in forked processes.

`fetch.py` turns one slice into one batch, a pure function of seed, epoch and positions.
`choose.py` measures where to run it; `readers.py` (this process, one thread) and `pool.py`
(loader processes) run it ahead of training. A loader process runs `process.py`; it is forked
by the process in `template.py`, and its batches travel as `wire.py` lays them out.

Nothing here knows workers, steps or models. Way in: `data/loader.py`, which uses all of this.
"""
