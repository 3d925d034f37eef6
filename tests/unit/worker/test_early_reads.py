"""What a worker shows of the samples that it reads while it gets ready."""

import threading
import time

import pytest
import torch

from instep.comm.protocol.messages import READING
from instep.data.loader import Loader
from instep.worker.reading.early_reads import EarlyReads
from instep.worker.reading.loader_watch import LoaderWatch

pytestmark = pytest.mark.process

MARKED = 5


class Data:
    """One sample is held until a file is there."""

    def __init__(self, go_on):
        self.go_on = go_on

    def __len__(self):
        return 16

    def __getitem__(self, index):
        while index == MARKED and not self.go_on.exists():
            time.sleep(0.001)
        return torch.tensor(index)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_read_is_shown_from_its_begin_to_its_end_wherever_it_is(tmp_path, processes):
    data = Data(tmp_path / "go on")
    loader = Loader(data, seed=0, shuffle=False, processes=processes)
    early = EarlyReads(LoaderWatch())
    try:
        assert early.heartbeat("building", 1.0).phase == "building"
        thread = threading.Thread(target=loader.fingerprint)
        thread.start()
        while early.heartbeat("building", 1.0).phase != READING:
            assert thread.is_alive()
        shown = None
        while (
            now := early.heartbeat("building", 1.0)
        ) != shown:  # until it has come to the held one
            shown = now
            time.sleep(0.2)
        assert (shown.phase, shown.step, shown.cpu_s) == (READING, 0, 1.0)
        data.go_on.touch()
        thread.join(600)
        assert early.heartbeat("building", 1.0).phase == "building"
    finally:
        data.go_on.touch()
        loader.close()
