"""How tensors and messages move between processes, and how numbers are encoded on the way.

Ways in: `base.Comm`, what a group of ranks can do together (`torch_comm.py` over gloo or NCCL,
`memory.py` between threads, `alone.py` for one); `connection.MasterConnection`, a process's
connection to the master, whose messages are in `messages.py`; `codecs/` for encodings. Models,
steps and members are not known here.
"""
