"""Computing one global batch on several workers as if on one.

While it computes, a pass may read from the passes of other workers: statistics of the whole batch,
or its embeddings, are exchanged between passes (`global_batch/`). A pass over several micro-batches
draws random numbers for each of them separately (`draws.py`). Parameters may be shared out over
ranks (`shard/`), one matrix product computed on several (`tensor/`), and the model cut into stages
(`pipeline/`); `split.py` does what a mesh says. Steps, strategies and recipes are not known here.
"""
