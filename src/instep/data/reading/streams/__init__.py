"""A stream as a dataset in which `dataset[number]` is a sample of one of its parts.

An `IterableDataset` gives samples one after the other, and has no length. A job divides it into
parts: each is one iterator over a copy of the dataset, which takes itself for a loader process of a
`DataLoader`, number `part` of `parts`. So the usual idiom with `get_worker_info()` divides it in
the same way at any number of workers. A sample is (part, epoch, count), and a part is read forward.
Who has to go back, or to begin in the middle, continues from a state that the dataset itself gave
(`state_dict()`), or else reads the part from its start.

`part.py` reads one part, `kept.py` keeps states for the next process, `stream.py` is what a loader
reads. Which samples make a step, `data/reading/streams/turns.py` says.
"""
