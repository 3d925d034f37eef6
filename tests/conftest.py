"""What every test may rely on: one thread, quick processes, nothing left over."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])
