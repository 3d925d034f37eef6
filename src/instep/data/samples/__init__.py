"""What is known of single samples: what they held, and which of them could not be read.

`contents.py` hashes what a sample holds, `fingerprint.py` recognises a dataset by such hashes,
`unreadable.py` says when a sample counts as unreadable, and `last_read.py` records which sample
a process reads, so that a crash can be explained.

Way in: each file for itself. Nothing here reads a dataset or knows processes; `data/reading/`
does. Importing this package does not import torch.
"""
