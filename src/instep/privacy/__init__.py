"""Training that reveals no sample: sampling, clipping, noise and accounting.

Nothing here knows workers, steps or networks. `grid.py` says how fine sums are and how much one
sample can change them, `per_sample.py` makes whole numbers of gradients, `noise.py` draws the
noise from a secret (`keys.py`), `sampling.py` says which samples a step has, and `accounting.py`
what all of it is worth.
"""
