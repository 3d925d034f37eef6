"""One rank of two that sum a tensor on a slow link; rank 0 gives up within the message.

python gives_up.py RANK ADDRESS FILE SECONDS: the file is where the ranks meet.
"""

import os
import sys
import threading

import torch
from torch.distributed import FileStore

from instep.comm.torch_comm import TorchComm
from instep.errors import PeerError

rank, address, file = int(sys.argv[1]), sys.argv[2], sys.argv[3]
comm = TorchComm(FileStore(file, 2), rank, 2, address=address, timeout_s=60.0)
tensor = torch.ones(100_000, dtype=torch.int32)  # half of it takes 1.6 s, in two messages
if rank == 0:
    threading.Timer(float(sys.argv[4]), comm.interrupt).start()
try:
    comm.all_reduce(tensor).wait()
except PeerError:
    comm.close()
    print("left", flush=True)
os._exit(0)
