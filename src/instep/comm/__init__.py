"""How tensors and messages move between processes, and how numbers are encoded on the way.

Ways in: `base.Comm`, what a group of ranks can do together (`torch_comm.py` over gloo or NCCL,
`memory.py` between threads, `alone.py` for one); `protocol/` for the connection of a process to the
master and its messages, `encryption/` for TLS, `codecs/` for encodings. Models, steps and members
are not known here.
"""
