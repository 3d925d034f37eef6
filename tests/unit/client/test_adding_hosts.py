"""A Slurm job that adds its nodes to a run: what it does where the run's master is silent."""

import threading

import pytest

from instep.client import join_run, running
from instep.client.join_run import _add
from instep.comm.encryption.certificates import Authority
from instep.comm.protocol.channel import LARGEST
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.messages import Hello, Welcome
from instep.errors import RunError
from instep.job import file as spec_file


@pytest.mark.parametrize("authority", [None, Authority()], ids=["plain", "encrypted"])
@pytest.mark.parametrize("greets", [True, False])
def test_a_master_that_stops_answering_is_not_waited_for(tmp_path, monkeypatch, greets, authority):
    """It was stopped, or cut off: the connection stays open. A handshake is no answer."""
    for module in (running, join_run):
        monkeypatch.setattr(module, "ANSWER_S", 0.5)
    job = spec_file.build({"recipe": "/gone/a.py:f"}, source="a test")
    (tmp_path / "job.toml").write_text(spec_file.dump(job))
    board, over = Switchboard(authority=authority), threading.Event()

    def welcome():
        while not over.is_set():
            for peer, message in board.hub.receive(0.05):
                peer.frames.largest = LARGEST
                if isinstance(message, Hello) and greets:
                    board.hub.send(peer, Welcome(job="", run="", started=0.0))

    master = threading.Thread(target=welcome, daemon=True)
    master.start()
    try:
        with (
            running.published(tmp_path, board.for_client()),
            pytest.raises(RunError, match=r"does not answer, for 0\.5 s"),
        ):
            _add(tmp_path, 1, 1)
    finally:
        over.set()
        master.join()
        board.close()
